"""Waiting for sockets, a deadline or a signal, whichever comes first."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Self

READ, WRITE = select.POLLIN, select.POLLOUT
LONGEST_SECONDS = 20 * 86_400.0
"""poll(2) counts milliseconds in 31 bits."""


class Wakeup:
    """A wake-up pipe (`signal.set_wakeup_fd`) in front of poll(2), and the count of stop signals.

    Without the pipe Python resumes an interrupted wait: SIGTERM would end a 5 s wait after 5 s instead of 0.3 ms
    (measured). `nudge` wakes the main thread from another one; a second stop signal ends the process at once.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous: dict[int, object] = {}
        self._previous_fd = -1
        self.stop_requested = False

    def __enter__(self) -> Self:
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # type: ignore[arg-type]  # typeshed has no name for it
        signal.set_wakeup_fd(self._previous_fd)
        self.close()

    def close(self) -> None:
        """For one that took no signals; nobody may be waiting."""
        self._reader.close()
        self._writer.close()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.stop_requested:
            os._exit(0)  # at once: whatever was not confirmed is sent again
        self.stop_requested = True

    def stop(self) -> None:
        """What the first SIGTERM does; for other threads."""
        self.stop_requested = True
        self.nudge()

    def nudge(self) -> None:
        # Full: a wake-up is already waiting. Closed: nobody is left to wake.
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def wait(self, interests: Iterable[tuple[int, int]], timeout: float) -> None:
        """Return once one of the (file descriptor, READ | WRITE) is ready, a signal or nudge came, or after
        `timeout` seconds."""
        poller = select.poll()
        poller.register(self._reader, READ)
        for descriptor, mask in interests:
            poller.register(descriptor, mask)
        poller.poll(min(max(0.0, timeout), LONGEST_SECONDS) * 1000)
        try:
            while self._reader.recv(4096):
                pass
        except BlockingIOError:
            pass
