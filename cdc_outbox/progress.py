"""How far a long job is, on one line of a terminal; nothing of it in a log, a file or a pipe.

The line is written over itself and taken away before a log line comes, and at the end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from cdc_outbox.metrics import Figures

EVERY_SECONDS = 0.5
FIRST_SECONDS = 1.0
"""What is done by then needs no line."""
_START, _CLEAR = "\r", "\r\x1b[K"

log = logging.getLogger("cdc_outbox")


class Line:
    """The last line of a terminal. For two threads: one that shows, one that logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._shown = False

    def show(self, text: str) -> None:
        with self._lock, contextlib.suppress(OSError):
            width = os.get_terminal_size(self._stream.fileno()).columns or 80
            self._stream.write(f"{_CLEAR}{text[: width - 1]}")
            self._stream.flush()
            self._shown = True

    def clear(self, record: logging.LogRecord | None = None) -> bool:
        """Also a filter of log records, that lets each one through."""
        with self._lock, contextlib.suppress(OSError):
            if self._shown:
                self._stream.write(_CLEAR)
                self._stream.flush()
            self._shown = False
        return True


def wanted() -> bool:
    """Is stderr a terminal that can take a line back?"""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


@contextlib.contextmanager
def shown(text: Callable[[float], str | None]) -> Iterator[None]:
    """Meanwhile show what `text` says, every half second, if it is wanted; None ends it for good. Its argument is the
    seconds so far."""
    if not wanted():
        yield
        return
    line = Line(sys.stderr)
    over = threading.Event()
    thread = threading.Thread(target=_keep_showing, args=(line, text, over), name="progress", daemon=True)
    for handler in log.handlers:
        handler.addFilter(line.clear)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        line.clear()
        for handler in log.handlers:
            handler.removeFilter(line.clear)


def _keep_showing(line: Line, text: Callable[[float], str | None], over: threading.Event) -> None:
    started = time.monotonic()
    wait = FIRST_SECONDS
    while not over.wait(wait):
        wait = EVERY_SECONDS
        said = text(time.monotonic() - started)
        if said is None:
            break
        line.show(said)
    line.clear()


def catching_up(figures: Figures) -> Callable[[float], str | None]:
    """A relay, from where its slot stands to where the WAL ended when it began to stream."""
    streaming_since: list[float] = []

    def text(seconds: float) -> str | None:
        if not figures.streaming:
            return ""
        if not streaming_since:
            streaming_since.append(seconds - EVERY_SECONDS)
        start, end = figures.start_lsn, figures.end_lsn
        if figures.confirmed_lsn >= end or (figures.received_lsn >= end and figures.pending_since is None):
            return None
        share = (figures.confirmed_lsn - start) / (end - start)
        return sentence("relayed", figures.relayed_rows, seconds - streaming_since[0], share=share)

    return text


def sentence(what: str, rows: int, seconds: float, *, of: int | None = None, share: float | None = None) -> str:
    """`relayed 1,200,000 of 3,000,000 rows, 110,000/s, 16 s left`. `share`: how much of it all is done, if known."""
    total = "" if of is None else f" of {of:,}"
    parts = [f"{what} {rows:,}{total} rows", f"{rows / max(seconds, 0.001):,.0f}/s"]
    if share:
        parts.append(f"{time_left(seconds * (1 - share) / share)} left")
    return ", ".join(parts)


def time_left(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
