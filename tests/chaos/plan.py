"""Which fault strikes when: everything that a seed decides, without doing any of it."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

SECOND = 0.3
"""How often a second fault strikes another part while the first one lasts."""
PAUSE_SECONDS = (0.5, 4.0)


class Kind(NamedTuple):
    """A fault's part of the whole, and for how long it lasts. Two of one part never strike at once. Each that is
    `telling` finds what no other one does, so that no run is too short for it."""

    part: str
    seconds: tuple[float, float]
    telling: bool = False


@dataclass(frozen=True, slots=True)
class Strike:
    kind: str
    seconds: float
    seed: int
    """For what the fault itself chooses: which relay, which link, which backend."""


@dataclass(frozen=True, slots=True)
class Step:
    """`second` strikes half way through `first`; both are healed, and then there is a pause."""

    first: Strike
    second: Strike | None
    pause: float

    @property
    def kinds(self) -> tuple[str, ...]:
        return (self.first.kind,) if self.second is None else (self.first.kind, self.second.kind)


def plan(seed: int, kinds: Mapping[str, Kind]) -> Iterator[Step]:
    """Without end, the telling kinds first. None comes a second time as `first` before each has come once."""
    choice = random.Random(f"faults {seed}")

    def strike(kind: str) -> Strike:
        return Strike(kind, choice.uniform(*kinds[kind].seconds), choice.getrandbits(32))

    def order() -> list[str]:
        return choice.sample(sorted(kinds), len(kinds))

    deck = sorted(order(), key=lambda kind: not kinds[kind].telling)
    while True:
        for kind in deck:
            first, second = strike(kind), None
            others = [other for other in sorted(kinds) if kinds[other].part != kinds[kind].part]
            if choice.random() < SECOND:
                second = strike(choice.choice(others))
            yield Step(first, second, choice.uniform(*PAUSE_SECONDS))
        deck = order()
