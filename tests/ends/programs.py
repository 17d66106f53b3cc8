"""Programs run as a user would: a Python process with its environment, its output in a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.fix_command import OURS
from tests.fix_postgres import Database
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
FOREIGN = (*OURS, "CELERY_", "WORKER_", "OTEL_", "DJANGO_")


def url(database: Database) -> str:
    return f"postgresql://postgres@127.0.0.1:{database.server.port}/{database.name}"


class Program:
    """`python ARGS`, from the top of the checkout."""

    def __init__(self, log: Path, *args: str, **environment: str) -> None:
        self.args = args
        self._log = log
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *args],
                cwd=ROOT,
                env={**kept, "PYTHONWARNINGS": "default", **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self, seconds: float = 30) -> int:
        return self._process.wait(seconds)

    def terminate(self, seconds: float = 20) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self.wait(seconds)

    def kill9(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def check_running(self) -> bool:
        assert self.running, f"{' '.join(self.args)} ended:\n{self.output()[-2000:]}"
        return True

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.running:
            self.kill9()


def run(log: Path, *args: str, seconds: float = 60, **environment: str) -> str:
    """To its end, which must be a good one; what it printed."""
    with Program(log, *args, **environment) as program:
        code = program.wait(seconds)
        assert code == 0, program.output()
        return program.output()


def until(database: Database, query: str, expected: object, *programs: Program, seconds: float = 40) -> None:
    """Waits until `query` gives `expected`; fails at once when one of the programs ends."""

    def reached() -> bool:
        if database.fetch_value(query) == expected:
            return True
        for program in programs:
            program.check_running()
        return False

    eventually(reached, seconds, f"{query} is {expected}")
