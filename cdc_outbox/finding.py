"""What one check found, and the list of checks.

A check is a function of what is to be checked; `@check("name")` puts it on the list, in the order of the sources. It
returns a Finding, or raises an OutboxError, which counts as a failure with that error's hint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Subject = TypeVar("Subject")


@dataclass(frozen=True, slots=True)
class Finding:
    """`verdict`: ok, warn (it works, and may hurt later), fail (the relay cannot work or would lose rows), or skip
    (cannot be told, or does not apply). `remedy`: the SQL or the option that mends it."""

    verdict: str
    found: str
    remedy: str = ""


def ok(found: str) -> Finding:
    return Finding("ok", found)


def warn(found: str, remedy: str) -> Finding:
    return Finding("warn", found, remedy)


def fail(found: str, remedy: str) -> Finding:
    return Finding("fail", found, remedy)


def skip(found: str) -> Finding:
    return Finding("skip", found)


class Checks(Generic[Subject]):
    """A list of checks, with their names, that is filled by its decorator."""

    def __init__(self) -> None:
        self.all: list[tuple[str, Callable[[Subject], Finding]]] = []

    def __call__(self, name: str) -> Callable[[Callable[[Subject], Finding]], Callable[[Subject], Finding]]:
        def add(function: Callable[[Subject], Finding]) -> Callable[[Subject], Finding]:
            self.all.append((name, function))
            return function

        return add
