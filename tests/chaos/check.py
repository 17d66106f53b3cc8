"""The standard check, on what the run left behind: pure, so that each fault can be planted and must be found.

All times are milliseconds since 1970 on one machine's clock. The topic stamps a record when it is appended
(LogAppendTime), so "before" and "after" are facts and not guesses.
"""

import itertools
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.chaos.truth import Attempt, Truth, resolve

EXAMPLES = 3
WRONG = {
    "lost": "committed rows that are not in the topic",
    "phantom": "records of rows that nobody committed",
    "purged before delivered": "rows deleted before they were in the topic",
    "confirmed before delivered": "rows behind which the slot stood before they were in the topic",
    "relayed before visible": "transactions in the topic before other sessions could see them",
    "out of order": "first occurrences behind a later row of the same task",
    "in two partitions": "records away from where the others of their task are",
    "never purged": "rows left in the table",
    "contradictions": "where Postgres and what it told a writer differ",
}


class Arrival(NamedTuple):
    """One record, in the order of its partition."""

    task: str
    n: int
    partition: int
    appended: int
    commit_lsn: int


class Purged(NamedTuple):
    task: str
    numbers: Sequence[int]
    at: float


class Sighting(NamedTuple):
    """A look at Postgres: between `before` and `after` the slot stood there and this snapshot was the latest."""

    before: float
    after: float
    confirmed: int
    snapshot: str


@dataclass(frozen=True, slots=True)
class Evidence:
    attempts: Sequence[Attempt]
    stored: Mapping[int, int]
    """tx -> xid, of each transaction that Postgres has."""
    arrivals: Iterable[Arrival]
    purged: Iterable[Purged]
    sightings: Sequence[Sighting]
    left: int
    """Rows that are still in the table at the end."""


@dataclass(slots=True)
class Figures:
    committed: int = 0
    transactions: int = 0
    rolled_back: int = 0
    resolved: int = 0
    delivered: int = 0
    repeated: int = 0
    overtaken: int = 0
    """Repeats that are no contiguous replay: what a hung broker or a thawed relay still had. Allowed for these only."""
    purged: int = 0
    wrong: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WRONG, 0))
    examples: dict[str, list[str]] = field(default_factory=dict)
    first_appends: list[int] = field(default_factory=list)
    """When each row was there for the first time, ascending."""

    def count(self, what: str, example: str) -> None:
        self.wrong[what] += 1
        found = self.examples.setdefault(what, [])
        if len(found) < EXAMPLES:
            found.append(example)

    @property
    def problems(self) -> list[str]:
        return [
            f"{count} {WRONG[what]} ({'; '.join(self.examples[what])})" for what, count in self.wrong.items() if count
        ]


class _Task:
    """The rows of one task by their place in commit order."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self.places = array("q", [-1]) * (max(numbers) + 1)
        for place, n in enumerate(numbers):
            self.places[n] = place
        self.appended = array("q", [0]) * len(numbers)  # 0: never
        self.commit_lsn = array("q", [0]) * len(numbers)
        self.last = self.furthest = -1
        self.home: int | None = None

    def place(self, n: int) -> int:
        return self.places[n] if 0 <= n < len(self.places) else -1


def check(evidence: Evidence) -> Figures:
    truth = resolve(evidence.attempts, evidence.stored)
    figures = Figures(rolled_back=truth.rolled_back, resolved=truth.resolved)
    tasks = {task: _Task(numbers) for task, numbers in truth.committed.items() if numbers}
    figures.committed = sum(len(task.numbers) for task in tasks.values())
    figures.transactions = sum(map(len, truth.transactions.values()))
    for contradiction in truth.contradictions:
        figures.count("contradictions", contradiction)
    for arrival in evidence.arrivals:
        _arrive(arrival, tasks.get(arrival.task), figures)
    for name, task in tasks.items():
        for place, appended in enumerate(task.appended):
            if not appended:
                figures.count("lost", f"{name} {task.numbers[place]}")
    figures.first_appends = sorted(ms for task in tasks.values() for ms in task.appended if ms)
    _check_purged(evidence.purged, tasks, figures)
    _check_confirmed(evidence.sightings, tasks, figures)
    _check_visible(evidence, truth, tasks, figures)
    if evidence.left:
        figures.count("never purged", f"{evidence.left} rows at the end")
        figures.wrong["never purged"] = evidence.left
    return figures


def _arrive(arrival: Arrival, task: _Task | None, figures: Figures) -> None:
    figures.delivered += 1
    place = task.place(arrival.n) if task is not None else -1
    if task is None or place < 0:
        figures.count("phantom", f"{arrival.task} {arrival.n}")
        return
    if task.home is None:
        task.home = arrival.partition
    elif task.home != arrival.partition:
        figures.count("in two partitions", f"{arrival.task} {arrival.n}")
    if not task.appended[place]:
        task.appended[place] = arrival.appended
        task.commit_lsn[place] = arrival.commit_lsn
        if place < task.furthest:
            figures.count("out of order", f"{arrival.task} {arrival.n}")
        task.furthest = max(task.furthest, place)
    else:
        figures.repeated += 1
        figures.overtaken += place > task.last + 1
    task.last = place


def _check_purged(purged: Iterable[Purged], tasks: Mapping[str, _Task], figures: Figures) -> None:
    for gone in purged:
        task = tasks.get(gone.task)
        for n in gone.numbers:
            figures.purged += 1
            place = task.place(n) if task is not None else -1
            # Whole milliseconds on the topic's side, rounded down: equal is not before.
            appended = task.appended[place] if task is not None and place >= 0 else 0
            if not appended or appended > gone.at:
                how = f"by {appended - gone.at:.0f} ms" if appended else "which never came"
                figures.count("purged before delivered", f"{gone.task} {n}, {how}")


def _check_confirmed(sightings: Sequence[Sighting], tasks: Mapping[str, _Task], figures: Figures) -> None:
    """`confirmed_flush_lsn` past the start of a row's commit record promises that the row has been delivered."""
    # After a crash of the server the slot may stand further back than it had stood: the furthest so far counts.
    furthest = list(itertools.accumulate((sighting.confirmed for sighting in sightings), max))
    for name, task in tasks.items():
        for place, appended in enumerate(task.appended):
            index = bisect_left(furthest, task.commit_lsn[place] + 1)
            if appended and index < len(furthest) and appended > sightings[index].after:
                figures.count("confirmed before delivered", f"{name} {task.numbers[place]}")


def _check_visible(evidence: Evidence, truth: Truth, tasks: Mapping[str, _Task], figures: Figures) -> None:
    """The first look that began after a transaction's first row was in the topic must see the transaction."""
    times = [sighting.before for sighting in evidence.sightings]
    for name, transactions in truth.transactions.items():
        start = 0
        for tx, count in transactions:
            appends = [ms for ms in tasks[name].appended[start : start + count] if ms] if count else []
            start += count
            if not appends:
                continue
            index = bisect_left(times, min(appends) + 1)
            if index < len(times) and not _sees(evidence.sightings[index].snapshot, evidence.stored[tx]):
                figures.count("relayed before visible", f"transaction {tx} of {name}")


def _sees(snapshot: str, xid: int) -> bool:
    """`xmin:xmax:xid,…`; the transaction is known to have committed."""
    first, end, running = snapshot.split(":")
    return xid < int(first) or (xid < int(end) and str(xid) not in running.split(","))
