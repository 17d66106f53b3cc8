"""One run: writers, witness and services at work, an ordeal for them, then everything healed, and the evidence."""

import logging
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.chaos.check import Evidence, Figures, Purged, check
from tests.chaos.site import Site
from tests.chaos.topic import arrivals
from tests.chaos.truth import Attempt
from tests.chaos.witness import Witness
from tests.chaos.writers import Writers
from tests.waiting import eventually

SETTLED_SECONDS = 240.0
"""Until every row is relayed and purged, once nothing strikes any more."""
CLEAN_END_SECONDS = 30.0
MOST_STALL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Struck:
    """Times in milliseconds since 1970; `healed` of the last one."""

    kinds: tuple[str, ...]
    began: float
    healed: float


@dataclass(frozen=True, slots=True)
class Outcome:
    struck: Sequence[Struck]
    figures: Figures
    wrong_ends: Sequence[str]
    ends: Counter[str]
    strict: bool = False

    @property
    def kinds(self) -> Counter[str]:
        return Counter(kind for struck in self.struck for kind in struck.kinds)

    @property
    def stall(self) -> tuple[float, str]:
        """Seconds from the end of a fault to the next new row in the topic, at the longest, and after which fault."""
        return max(stalls(self.struck, self.figures.first_appends), default=(0.0, "none"))

    @property
    def problems(self) -> list[str]:
        seconds, kind = self.stall
        stalled = [f"a stall of {seconds:.1f} s after {kind}"] if seconds > MOST_STALL_SECONDS else []
        empty = [] if self.figures.committed else ["no row was committed, so nothing was tried"]
        overtaken = self.figures.overtaken if self.strict else 0
        scattered = [f"{overtaken} repeats that are no contiguous replay"] if overtaken else []
        return [*self.figures.problems, *scattered, *self.wrong_ends, *stalled, *empty]


def stalls(struck: Sequence[Struck], first_appends: Sequence[int]) -> list[tuple[float, str]]:
    """A fault during whose stall the next one began is left to that one."""
    found = []
    for index, one in enumerate(struck):
        place = bisect_right(first_appends, one.healed)
        resumed = first_appends[place] if place < len(first_appends) else None
        following = struck[index + 1].began if index + 1 < len(struck) else float("inf")
        if resumed is not None and resumed < following:
            found.append(((resumed - one.healed) / 1000, " + ".join(one.kinds)))
    return found


def trial(site: Site, seed: int, ordeal: Callable[[Site], Sequence[Struck]], *, strict: bool) -> Outcome:
    logging.getLogger("psycopg").setLevel(logging.ERROR)  # a rollback on a dead connection is no news here
    dsn = site.database.socket_dsn
    witness = Witness(dsn, site.slot)
    with Writers(dsn, seed) as writers:
        struck = ordeal(site)
    attempts = writers.join(120)
    left = _settle(site)
    wrong_ends = site.close_services(CLEAN_END_SECONDS)
    witness.close()
    figures = check(_evidence(site, attempts, witness, left))
    ends = sum((service.ends for service in site.services), Counter[str]())
    return Outcome(struck, figures, wrong_ends, ends, strict)


def _settle(site: Site) -> int:
    """Rows that are left in the table although there was time."""

    def left() -> int:
        for service in site.services:
            service.tend()
        return int(site.database.fetch_value("select count(*) from outbox"))

    deadline = time.monotonic() + SETTLED_SECONDS
    eventually(lambda: time.monotonic() > deadline or not left(), SETTLED_SECONDS + 30)
    return left()


def _evidence(site: Site, attempts: Sequence[Attempt], witness: Witness, left: int) -> Evidence:
    stored = site.database.fetch("select tx, xid::text::bigint from chaos_transaction")
    purged = site.database.fetch("select task, numbers, extract(epoch from at) * 1000 from chaos_purged order by at")
    return Evidence(
        attempts=attempts,
        stored=dict(stored),
        arrivals=arrivals(site.kafka.bootstrap, site.topic),
        purged=[Purged(task, numbers, float(at)) for task, numbers, at in purged],
        sightings=witness.sightings,
        left=left,
    )
