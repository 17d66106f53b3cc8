"""The proof that a slot is still the one that was set up, and still covers the table.

Before the relay reports a flush position X it has stored X in `outbox_checkpoint`. So a slot that is further than
its stored position was re-created or advanced by someone else: rows may be missing from the stream, and a purge
that believed the slot would delete them. The same row remembers what the slot covered at `init-slot`: a table
dropped and re-created, or a publication without it for a minute, makes rows that never arrive, without any error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cdc_outbox.errors import GapError
from cdc_outbox.lsn import format_lsn, parse_lsn
from cdc_outbox.objects import SLOT_QUERY, WAY_BACK, Objects, Slot, parse_slot, usable
from cdc_outbox.query import Queries, Row
from cdc_outbox.statements import fill

# oid and xmin of both catalogue rows: any ALTER PUBLICATION gives its row a new xmin, a drop and re-creation a new
# oid. An identity, therefore, that no change can come back to.
_COVERAGE = """
select (select system_identifier from pg_control_system())::text as system_identifier,
       to_regclass(:'table')::oid::text as table_oid,
       p.oid::text as publication_oid, p.xmin::text as publication_xmin,
       r.oid::text as publication_rel_oid, r.xmin::text as publication_rel_xmin
from (values (1)) one
left join pg_publication p on p.pubname = :'publication'
left join pg_publication_rel r on r.prpubid = p.oid and r.prrelid = to_regclass(:'table')"""

_COLUMNS = (
    "system_identifier",
    "table_oid",
    "publication_oid",
    "publication_xmin",
    "publication_rel_oid",
    "publication_rel_xmin",
)

OTHER_CLUSTER = "this is another database cluster than the one the slot was set up in"
OTHER_PUBLICATION = "the publication was dropped or re-created"
DIFFERENCES = (
    OTHER_CLUSTER,
    "the table was dropped and re-created, or another one took its name",
    OTHER_PUBLICATION,
    "the publication was altered",
    "the table was taken out of the publication",
    "the publication's entry for the table was altered",
)
"""What it means when a coverage differs, by the first column that does."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    position: int
    coverage: tuple[str | None, ...]


def compare_sql(objects: Objects) -> str:
    """One row: position, then the stored coverage, then today's."""
    stored = ", ".join(f"k.{column}::text" for column in _COLUMNS)
    return fill(
        f"select k.position, {stored}, c.* from ({_COVERAGE}) c"
        f" left join {objects.checkpoint} k on k.slot_name = :'slot'",
        _literals(objects),
    )


def store_sql(objects: Objects) -> str:
    """$1 slot, $2 position. Never goes down; no row means that the checkpoint is gone."""
    return (
        f"update {objects.checkpoint} set position = greatest(position, $2::pg_lsn), stored_at = now()"
        " where slot_name = $1 returning position"
    )


def reset_sql(objects: Objects, position: int) -> str:
    """From now on the slot covers what is there now. The row's position, which it returns: `position`, or where the
    slot is if that is further."""
    columns = ", ".join(_COLUMNS)
    confirmed = "(select confirmed_flush_lsn from pg_replication_slots where slot_name = :'slot')"
    return fill(
        f"insert into {objects.checkpoint} (slot_name, position, {columns})"
        f" select :'slot', greatest(:'position'::pg_lsn, {confirmed}), system_identifier, table_oid::oid,"
        f" publication_oid::oid, publication_xmin, publication_rel_oid::oid, publication_rel_xmin from ({_COVERAGE}) c"
        f" on conflict (slot_name) do update set (position, {columns}, stored_at) ="
        f" (excluded.position, {', '.join(f'excluded.{column}' for column in _COLUMNS)}, now())"
        " returning position",
        {**_literals(objects), "position": format_lsn(position)},
    )


def _literals(objects: Objects) -> dict[str, str]:
    return {"slot": objects.slot, "table": objects.outbox, "publication": objects.publication}


def parse_comparison(row: Row) -> tuple[Checkpoint | None, tuple[str | None, ...]]:
    """(stored, today's coverage)."""
    width = len(DIFFERENCES)
    stored = Checkpoint(parse_lsn(row[0]), row[1 : 1 + width]) if row[0] is not None else None
    return stored, row[1 + width :]


def difference(stored: tuple[str | None, ...], now: tuple[str | None, ...]) -> str | None:
    """In words, or None."""
    for before, after, words in zip(stored, now, DIFFERENCES, strict=True):
        if before != after:
            return words
    return None


def check(objects: Objects, slot: Slot, comparison: Row) -> None:
    """The guard. Raises GapError unless every row of the table is, or was, on its way through this slot."""
    stored, coverage = parse_comparison(comparison)
    if stored is None:
        raise GapError(f"slot {objects.slot} was not made by `cdc-outbox init-slot`", WAY_BACK)
    if slot.confirmed_flush_lsn > stored.position:
        raise GapError(
            f"slot {objects.slot} is at {format_lsn(slot.confirmed_flush_lsn)}, but this relay confirmed only"
            f" {format_lsn(stored.position)}: it was re-created or advanced by someone else",
            WAY_BACK,
        )
    if (words := difference(stored.coverage, coverage)) is not None:
        raise GapError(f"{words}: rows of {objects.outbox} may never arrive", WAY_BACK)


def ask_check(queries: Queries, objects: Objects, passed: Callable[[], None]) -> None:
    """The guard, without waiting: `passed` is called, or `Queries.service` raises GapError.

    Slot first, checkpoint after, in two statements: the other way round a moving relay looks like a moved slot.
    """
    slots: list[Slot] = []

    def slot_read(rows: list[Row]) -> None:
        slots.append(usable(objects.slot, parse_slot(objects.slot, rows[0]) if rows else None))

    def answered(rows: list[Row]) -> None:
        check(objects, slots[0], rows[0])
        passed()

    queries.ask(SLOT_QUERY, [objects.slot], slot_read, "reading pg_replication_slots")
    queries.ask(compare_sql(objects), [], answered, "reading the checkpoint")


def check_now(queries: Queries, objects: Objects) -> None:
    """The guard, waiting for its answer. Not inside an older snapshot: it would compare yesterday's checkpoint."""
    passed: list[bool] = []
    ask_check(queries, objects, lambda: passed.append(True))
    queries.wait_until(lambda: bool(passed), "comparing the slot with its checkpoint")
