"""A command of ours in a process of its own, so that it can be killed, paused and asked for its figures."""

from __future__ import annotations

import contextlib
import http.client
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cdc_outbox.embedded import ServerProcess
from cdc_outbox.errors import ConfigError, OutboxError, PreconditionError

COMMAND = (sys.executable, "-P", "-m", "cdc_outbox")  # -P: import nothing from the current folder


class CommandProcess(ServerProcess):
    """What it said is in its log."""

    name = "cdc-outbox"

    def __init__(self, directory: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(directory, None, die_with_parent=True)
        self.arguments = arguments
        self._spawn([*COMMAND, *arguments], environment, signal.SIGKILL)

    def wait_for(self, text: str, seconds: float) -> None:
        """Until its log says so. Raises what its exit code stands for."""
        with contextlib.suppress(PreconditionError):
            self._wait_ready(lambda: self.log_contains(text), seconds)
            return
        self.raise_failure(f"did not say {text.strip()!r} within {seconds:.0f} s")

    def raise_failure(self, otherwise: str) -> None:
        kind = {2: ConfigError, 3: PreconditionError}.get(self.exit_code or 0, OutboxError)
        message, _, hint = self.last_line().removeprefix("error: ").partition("; hint: ")
        raise kind(message if self.exit_code else f"{self.arguments[0]} {otherwise}: {message}", hint)

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def wait(self, seconds: float) -> None:
        """Until it ends by itself."""
        try:
            self._wait_end(seconds)
        except TimeoutError as error:
            raise OutboxError(str(error)) from None

    def stop(self) -> None:
        self.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            self._wait_end(12)

    def figure(self, name: str) -> float:
        """A metric; 0 while it is not there."""
        port = re.search(r"metrics on port (\d+)", self.log_text())
        if port is None:
            return 0.0
        connection = http.client.HTTPConnection("127.0.0.1", int(port[1]), timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/metrics")
            page = connection.getresponse().read().decode()
            return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"{name}{{"))
        return 0.0
