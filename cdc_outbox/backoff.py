"""Waits that double, up to a limit."""

from __future__ import annotations

import random


class Backoff:
    """From `first` to `longest` seconds; `reset` after a success."""

    __slots__ = ("_first", "_longest", "_next")

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self._next = first

    def next(self, *, jitter: bool = False) -> float:
        """Seconds to wait now; `jitter` takes off up to half, so that several do not come back together."""
        wait = self._next
        self._next = min(2 * wait, self._longest)
        return wait * random.uniform(0.5, 1.0) if jitter else wait

    def reset(self) -> None:
        self._next = self._first
