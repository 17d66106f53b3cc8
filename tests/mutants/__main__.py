"""python -m tests.mutants [WORDS]: makes each mutant (whose name has all of WORDS) and runs its tests on it.

Each in a copy of the tree, two at a time. First the tests run on what ships, or their failures would say nothing.
Exits 1 if a mutant survives.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import TREE, Mutant

AT_ONCE = 2
LIMIT_SECONDS = 300
"""After which a mutant's tests count as failed: it hangs."""
ALL_SECONDS = 1800
"""The same for all tests, without a mutant."""
COPIED = ("cdc_outbox", "sql", "tests", "examples", "pyproject.toml", "README.md")
TESTS_FAILED = 1


def run_tests(tree: Path, tests: Iterable[str], seconds: float = LIMIT_SECONDS) -> tuple[str, str]:
    """("passed", "failed", "hung" or "broken": no test could say anything; the end of what pytest printed)."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist"]
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        [*command, *tests],
        cwd=tree,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return "hung", output
    verdict = {0: "passed", TESTS_FAILED: "failed"}.get(process.returncode, "broken")
    return verdict, output


def try_mutant(mutant: Mutant) -> tuple[str, float, str]:
    """("killed", "killed, it hung", "SURVIVED" or "BROKEN"; seconds; by which test)."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant_") as folder:
        tree = copy_tree(Path(folder))
        if mutant.occurrences(tree) != 1:
            return "BROKEN", 0.0, f"its old text occurs {mutant.occurrences(tree)} times in {mutant.file}"
        mutant.apply(tree)
        verdict, output = run_tests(tree, mutant.tests)
    words = {"failed": "killed", "hung": "killed, it hung", "passed": "SURVIVED", "broken": "BROKEN"}
    found = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    by = found[0].split(" - ")[0].split("::", 1)[-1] if found else ", ".join(mutant.tests)
    return words[verdict], time.monotonic() - began, by


def copy_tree(target: Path) -> Path:
    for name in COPIED:
        source = TREE / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)
    return target


def main(words: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if all(word in mutant.name for word in words)]
    tests = dict.fromkeys(name for mutant in chosen for name in mutant.tests)
    with tempfile.TemporaryDirectory(prefix="mutant_none_") as folder:
        verdict, output = run_tests(copy_tree(Path(folder)), tests, ALL_SECONDS)
    if verdict != "passed":
        print(output)
        print("the tests fail on what ships: nothing can be said of mutants")
        return 1
    print(f"without a mutant: {output.strip().splitlines()[-1]}", flush=True)
    killed = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for mutant, (fate, seconds, by) in zip(chosen, pool.map(try_mutant, chosen), strict=True):
            killed += fate.startswith("killed")
            print(f"{fate:16} {seconds:5.0f} s  {mutant.name} ({mutant.file}): {by}", flush=True)
    print(f"{killed} of {len(chosen)} mutants killed")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
