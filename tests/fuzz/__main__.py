"""`make fuzz SECONDS=600`: every target for its share of the time, guided by coverage, from the golden bytes on.

Nothing but what a target allows may be raised; no input may take long, and none much memory. Exit 1 if one does, with
the file that shows it.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.corpus import SEEDS

LIMITS = ["-timeout=10", "-rss_limit_mb=1024", "-malloc_limit_mb=64", "-print_final_stats=1"]
LONGEST = {"message": 4096, "stream": 16384, "row": 4096, "request": 4096, "text": 256}


@dataclass(frozen=True, slots=True)
class Result:
    target: str
    executions: int
    seconds: int
    coverage: int
    corpus: int
    peak_mb: int
    found: str

    def __str__(self) -> str:
        return (
            f"{self.target:<9}{self.executions:>12,}{self.seconds:>9}{self.coverage:>10,}{self.corpus:>9,}"
            f"{self.peak_mb:>9}  {self.found or 'nothing'}"
        )


HEAD = f"{'target':<9}{'executions':>12}{'seconds':>9}{'coverage':>10}{'corpus':>9}{'peak MB':>9}  found"


def fuzz(target: str, seconds: int, directory: Path) -> Result:
    corpus = directory / target
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(SEEDS[target]):
        (corpus / f"seed-{number}").write_bytes(seed)
    options = [*LIMITS, f"-max_total_time={seconds}", f"-max_len={LONGEST[target]}", f"-artifact_prefix={directory}/"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.run", target, str(corpus), *options],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    log = done.stderr

    def last(pattern: str) -> int:
        found = re.findall(pattern, log)
        return int(found[-1]) if found else 0

    failed = re.findall(r"Test unit written to (\S+)", log)
    if done.returncode and not failed:
        failed = [f"exit {done.returncode}"]
    if failed:
        print(
            "\n".join(line for line in log.splitlines() if not line.startswith(("#", "INFO")))[-3000:], file=sys.stderr
        )
    return Result(
        target,
        executions=last(r"stat::number_of_executed_units: (\d+)"),
        seconds=last(r"Done \d+ runs in (\d+) second"),
        coverage=last(r"cov: (\d+)"),
        corpus=last(r"corp: (\d+)/"),
        peak_mb=last(r"stat::peak_rss_mb: +(\d+)"),
        found=failed[0] if failed else "",
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description="Fuzz what reads bytes that others wrote.")
    parser.add_argument("seconds", type=int, help="for all targets together")
    parser.add_argument("targets", nargs="*", choices=[[], *SEEDS], help="all by default")
    parser.add_argument("--corpus", type=Path, help="where to keep what was found, for the next run")
    given = parser.parse_args()
    directory = given.corpus or Path(tempfile.mkdtemp(prefix="cdc-outbox-fuzz-"))
    targets = given.targets or list(SEEDS)
    print(HEAD)
    results = []
    for target in targets:
        results.append(fuzz(target, max(1, given.seconds // len(targets)), directory))
        print(results[-1], flush=True)
    print(f"{'all':<9}{sum(result.executions for result in results):>12,}")
    return any(result.found for result in results)


if __name__ == "__main__":
    sys.exit(main())
