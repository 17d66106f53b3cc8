"""Waits for a condition, with a deadline: what tests do instead of sleeping."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(predicate: Callable[[], T], deadline_seconds: float = 10, message: str | None = None) -> T:
    """Polls until `predicate()` is true and returns its value; fails after the deadline.

    An exception of the predicate ends the wait: return something false to go on.
    """
    deadline = time.monotonic() + deadline_seconds
    while not (value := predicate()):
        if time.monotonic() > deadline:
            what = message or getattr(predicate, "__name__", "the condition")
            raise AssertionError(f"after {deadline_seconds:g} s: {what} (last value: {value!r})")
        time.sleep(0.02)
    return value
