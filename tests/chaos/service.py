"""One process of the command, started again whenever it ends, as a service manager would."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Self

from tests.fix_command import Running

RESTART_SECONDS = 0.2
OURS = {0: "stopped", -9: "killed"}
"""Exit codes that a fault asked for."""
STREAMED = ("streaming ", "rows purged")
"""What a log says only after the first contact: from then on nothing that comes back may end the process."""


class Service:
    def __init__(self, name: str, start: Callable[[], Running]) -> None:
        self.name = name
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        """Ends that no fault asked for."""
        self._start = start
        self._retired = False
        self._lock = threading.Lock()
        self.running = start()

    def tend(self) -> None:
        """Start it again if it has ended."""
        with self._lock:
            if not (self._retired or self.running.running):
                self._note()
                self.running = self._start()

    def retire(self, seconds: float) -> None:
        """The last SIGTERM; a clean end is due within `seconds`."""
        with self._lock:
            self._retired = True
        if self.running.running:
            code = self.running.terminate(seconds)
            if code:
                self.wrong.append(f"{self.name}: exit {code} after SIGTERM: {self._last_line()}")
        else:
            self._note()

    def _note(self) -> None:
        code = self.running.wait(1)
        if code in OURS:
            self.ends[OURS[code]] += 1
        elif code == 3 and not self._had_contact():
            self.ends["not started, since Postgres was away"] += 1
        else:
            self.wrong.append(f"{self.name}: exit {code}: {self._last_line()}")

    def _had_contact(self) -> bool:
        said = self.running.stdout_text() + self.running.stderr_text()
        return any(text in said for text in STREAMED)

    def _last_line(self) -> str:
        return (self.running.stderr_text().splitlines() or ["(no log)"])[-1]


class Tending:
    """The thread that looks after the services, until the end of `with`."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = services
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tending", daemon=True)
        self.failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while not self._stop.wait(RESTART_SECONDS):
                for service in self._services:
                    service.tend()
        except BaseException as failure:
            self.failure = failure
