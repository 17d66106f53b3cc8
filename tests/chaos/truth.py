"""What the writers tried to commit, and which of it Postgres has.

Each transaction puts its number into a side table, in the same commit as its rows. Where a connection died in COMMIT
the writer cannot know what became of it; that row does.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

TABLES = """
create table chaos_transaction (tx bigint primary key, xid xid8 not null default pg_current_xact_id());
create table chaos_purged (at timestamptz not null, task text not null, numbers bigint[] not null);

-- What is purged, and when, in the purge's own transaction: nothing leaves the table unseen.
create function chaos_note_purged() returns trigger language plpgsql as $$
begin
    insert into chaos_purged
    select clock_timestamp(), task, array_agg((args ->> 'n')::bigint) from gone group by task;
    return null;
end $$;
create trigger chaos_note_purged after delete on outbox referencing old table as gone
for each statement execute function chaos_note_purged()"""


class Said(Enum):
    """What the writer heard of its transaction."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One transaction. A row is a (task, n); a task belongs to one writer, whose transactions follow each other."""

    tx: int
    task: str
    kept: tuple[range, ...]
    undone: tuple[range, ...] = ()
    said: Said = Said.COMMITTED


@dataclass(slots=True)
class Truth:
    """Task -> the n of its committed rows, in commit order; (tx, task, n) of every other row that was written."""

    committed: dict[str, list[int]] = field(default_factory=dict)
    transactions: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Task -> (tx, how many rows) of its committed transactions, in the same order."""
    rolled_back: int = 0
    resolved: int = 0
    """Transactions of which the writer heard nothing."""
    contradictions: list[str] = field(default_factory=list)
    """Where Postgres and what it said to a writer differ: then nothing here proves anything."""


def resolve(attempts: Iterable[Attempt], stored: Mapping[int, int]) -> Truth:
    """`stored`: tx -> xid, of each transaction that Postgres has."""
    truth = Truth()
    for attempt in attempts:
        committed = attempt.tx in stored
        if attempt.said is Said.NOTHING:
            truth.resolved += 1
        elif committed != (attempt.said is Said.COMMITTED):
            truth.contradictions.append(f"transaction {attempt.tx} was {attempt.said.value}, said Postgres")
        truth.rolled_back += rows(attempt.undone)
        if committed:
            numbers = truth.committed.setdefault(attempt.task, [])
            for part in attempt.kept:
                numbers.extend(part)
            truth.transactions.setdefault(attempt.task, []).append((attempt.tx, rows(attempt.kept)))
        else:
            truth.rolled_back += rows(attempt.kept)
    return truth


def rows(parts: Sequence[range]) -> int:
    return sum(map(len, parts))
