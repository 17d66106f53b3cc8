"""The installed `cdc-outbox` command, run as a user would: a process, its output, its exit code."""

import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.waiting import eventually

EXECUTABLE = Path(sys.executable).with_name("cdc-outbox")
# What the tester's shell may hold and what would quietly configure the command.
OURS = ("CDC_OUTBOX_", "PG", "KAFKA_", "DATABASE_URL")


_CURL = """#!{python}
import sys, urllib.request
url = sys.argv[-1] if "://" in sys.argv[-1] else "http://" + sys.argv[-1]
sys.stdout.write(urllib.request.urlopen(url, timeout=10).read().decode())
"""


def path_with_curl(folder: Path) -> str:
    """PATH, with a program in `folder` that does for `curl -s URL` where a machine has none: a fresh Debian has not."""
    path = os.environ.get("PATH", os.defpath)
    if shutil.which("curl"):
        return path
    curl = folder / "curl"
    curl.write_text(_CURL.format(python=sys.executable))
    curl.chmod(0o755)
    return f"{path}:{folder}"


class Running:
    """One process of the command. Its stdout and stderr go to files."""

    def __init__(self, args: list[str], env: dict[str, str], directory: Path) -> None:
        self.args = args
        self._stdout = directory / "stdout"
        self._stderr = directory / "stderr"
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                [str(EXECUTABLE), *args],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=env,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stdout_text(self) -> str:
        return self._stdout.read_text(errors="replace")

    def stderr_text(self) -> str:
        return self._stderr.read_text(errors="replace")

    def wait_for_log(self, text: str, deadline: float = 20) -> None:
        """Returns when stderr contains `text`; fails at once when the process ends without it."""

        def found() -> bool:
            running = self.running  # asked first: what was written before the end is then seen
            if text in self.stderr_text():
                return True
            assert running, f"exit {self._process.returncode} before {text!r}:\n{self._tail()}"
            return False

        eventually(found, deadline, f"{text!r} in the log of {self}")

    def signal(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)

    def kill9(self) -> None:
        """Returns when the process is gone."""
        self._process.kill()
        self._process.wait(10)

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def wait(self, timeout: float = 20) -> int:
        """The exit code; negative for a signal."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self} still runs after {timeout:g} s:\n{self._tail()}") from None

    def terminate(self, timeout: float = 20) -> int:
        """SIGTERM; the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout)

    def close(self) -> None:
        if self.running:
            self.kill9()

    def __str__(self) -> str:
        return " ".join(["cdc-outbox", *self.args])

    def _tail(self) -> str:
        return "\n".join(self.stderr_text().splitlines()[-20:])


class Command:
    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._count = 0

    def run(
        self,
        *args: object,
        env: Mapping[str, str] | None = None,
        input: str | None = None,
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Runs to the end; `.returncode`, `.stdout`, `.stderr`. Killed after `timeout` seconds."""
        return subprocess.run(
            [str(EXECUTABLE), *map(str, args)],
            env=_environment(env),
            input=input or "",
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start(self, *args: object, env: Mapping[str, str] | None = None) -> Running:
        """Starts it and returns; killed at the end of the test if it still runs."""
        self._count += 1
        directory = self._directory / str(self._count)
        directory.mkdir()
        running = Running([str(arg) for arg in args], _environment(env), directory)
        self._stack.callback(running.close)
        return running


def get(url: str, timeout: float = 5) -> tuple[int, str]:
    """Status and body, also of an error."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def scrape(url: str) -> dict[str, float]:
    """The samples of a metrics page: `{'name{label="x"}': value}`."""
    status, body = get(url)
    assert status == 200, f"{url} answers {status}"
    lines = [line for line in body.splitlines() if line and not line.startswith("#")]
    pairs = [line.rsplit(" ", 1) for line in lines]
    return {name: float(value) for name, value in pairs}


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return {**kept, **(extra or {})}


@pytest.fixture
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """`command.run(...)` and `command.start(...)` of the installed `cdc-outbox`."""
    assert EXECUTABLE.exists(), "install the package into the environment that runs pytest"
    with ExitStack() as stack:
        yield Command(tmp_path_factory.mktemp("command"), stack)
