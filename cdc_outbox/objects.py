"""What stands in the database, by name: the outbox table, what is beside it, the slot, the publication."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from cdc_outbox.errors import GapError, PreconditionError, SlotInUse
from cdc_outbox.lsn import parse_lsn
from cdc_outbox.query import Queries
from cdc_outbox.statements import qualified

WAY_BACK = "run `cdc-outbox init-slot`: it sends every row that is still in the table"

_RESOLVE = """
select c.oid, n.nspname, c.relname, c.relkind
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.oid = to_regclass($1)"""

# As JSON: which columns pg_replication_slots has depends on the server's version.
SLOT_QUERY = """
select to_jsonb(s), current_database()
from pg_replication_slots s where slot_name = $1"""


_HOLDER = """
select format('pid %s (%s, %s, since %s)', s.active_pid, coalesce(nullif(a.application_name, ''), 'no name'),
              coalesce(host(a.client_addr), 'local'), to_char(a.backend_start, 'YYYY-MM-DD HH24:MI:SS'))
from pg_replication_slots s left join pg_stat_activity a on a.pid = s.active_pid
where s.slot_name = $1 and s.active_pid is not null"""

_ROW_FILTER = """
select pg_get_expr(r.prqual, r.prrelid)
from pg_publication p join pg_publication_rel r on r.prpubid = p.oid
where p.pubname = $1 and r.prrelid = $2::oid"""

_COLUMNS = """
select attname, format_type(atttypid, atttypmod), atthasdef or attidentity <> '', attgenerated <> ''
from pg_attribute where attrelid = $1::oid and attnum > 0 and not attisdropped order by attnum"""

_BYTEA_TYPES = """
with recursive t as (
    select 'bytea'::regtype::oid as oid union select d.oid from pg_type d join t on d.typbasetype = t.oid
)
select oid from t"""


@dataclass(frozen=True, slots=True)
class Objects:
    """Names as they are in the catalogue, unquoted; properties are quoted and qualified."""

    schema: str
    table: str
    oid: int
    slot: str
    publication: str

    @property
    def outbox(self) -> str:
        return qualified(self.schema, self.table)

    @property
    def checkpoint(self) -> str:
        return qualified(self.schema, f"{self.table}_checkpoint")

    @property
    def dead_letter(self) -> str:
        return qualified(self.schema, f"{self.table}_dead_letter")

    @property
    def archive(self) -> str:
        return qualified(self.schema, f"{self.table}_archive")

    @property
    def archived_at(self) -> str:
        """The archive's index."""
        return qualified(self.schema, f"{self.table}_archived_at")

    def names(self) -> dict[str, str]:
        """The placeholders of the files in `sql/`."""
        return {
            "schema": self.schema,
            "outbox": self.table,
            "checkpoint": f"{self.table}_checkpoint",
            "dead_letter": f"{self.table}_dead_letter",
            "archive": f"{self.table}_archive",
            "archived_at": f"{self.table}_archived_at",
            "slot": self.slot,
            "publication": self.publication,
        }


@dataclass(frozen=True, slots=True)
class Column:
    """`type` is SQL; `generated`: Postgres computes it, and takes no value."""

    name: str
    type: str
    has_default: bool
    generated: bool


def columns(queries: Queries, objects: Objects) -> list[Column]:
    rows = queries.call(_COLUMNS, [objects.oid], doing="reading the table's columns")
    return [Column(name or "", kind or "", default == "t", gen == "t") for name, kind, default, gen in rows]


def bytea_types(queries: Queries) -> frozenset[int]:
    """The oids of bytea and of the domains over it."""
    return frozenset(int(oid or 0) for (oid,) in queries.call(_BYTEA_TYPES, doing="looking for domains"))


def published(queries: Queries, objects: Objects) -> str:
    """Which rows the publication sends, as a condition on the table: a shard's row filter, or `true`.

    As it is now; that it was so since `init-slot` is what the checkpoint guard proves, before and after.
    """
    rows = queries.call(_ROW_FILTER, [objects.publication, objects.oid], doing="reading the publication")
    return (rows[0][0] if rows else None) or "true"


def resolve(queries: Queries, table: str, slot: str, publication: str) -> Objects | None:
    """Find `table` (SQL's own syntax, `search_path` for a bare name); None if there is no such table.

    Raises PreconditionError if it is no table, or if `table` is no name.
    """
    rows = queries.call(_RESOLVE, [table], doing=f"looking for table {table}")
    if not rows:
        return None
    oid, schema, name, kind = rows[0]
    if kind not in ("r", "p"):
        raise PreconditionError(f"{table} is not a table", "name a table with --table")
    return Objects(str(schema), str(name), int(oid or 0), slot, publication)


_TO_BE = """
select case when array_length(p, 1) > 1 then p[1] else current_schema() end, p[array_length(p, 1)]
from parse_ident($1) p"""


def table_to_be(queries: Queries, table: str) -> tuple[str, str]:
    """(schema, name) that `create table` would give to `table`. Raises PreconditionError."""
    schema, name = queries.call(_TO_BE, [table], doing=f"reading the name {table}")[0]
    if schema is None:
        raise PreconditionError("no schema to create a table in: search_path is empty", "write SCHEMA.NAME")
    return schema, str(name)


def require(queries: Queries, table: str, slot: str, publication: str) -> Objects:
    """`resolve`, or PreconditionError."""
    objects = resolve(queries, table, slot, publication)
    if objects is None:
        raise PreconditionError(
            f"table {table} does not exist in this database",
            "run `cdc-outbox init-slot`, or name the table with --table",
        )
    return objects


@dataclass(frozen=True, slots=True)
class Slot:
    """One row of pg_replication_slots that is a slot of ours in kind and database."""

    confirmed_flush_lsn: int
    active_pid: int | None
    lost: str | None
    """Why the slot can no longer be read, or None."""


def find_slot(queries: Queries, name: str) -> Slot | None:
    """None if there is none. Raises PreconditionError for a slot of another kind: to read it would bring a false
    "invalidated" error (measured), and to drop it would break somebody else's."""
    rows = queries.call(SLOT_QUERY, [name], doing="reading pg_replication_slots")
    return parse_slot(name, rows[0]) if rows else None


def parse_slot(name: str, row: tuple[str | None, ...]) -> Slot:
    slot: dict[str, Any] = json.loads(row[0] or "{}")
    wrong = [
        f"{column} = {slot.get(column)}"
        for column, right in (
            ("slot_type", "logical"),
            ("plugin", "pgoutput"),
            ("database", row[1]),
            ("temporary", False),
            ("two_phase", False),
        )
        if slot.get(column) != right
    ]
    if wrong:
        raise PreconditionError(
            f"slot {name} is not one this relay can read: {', '.join(wrong)}",
            "choose another name with --slot",
        )
    lost = slot.get("invalidation_reason")
    if lost is None and slot.get("wal_status") == "lost":
        lost = "wal_removed"
    confirmed = slot.get("confirmed_flush_lsn")
    return Slot(parse_lsn(confirmed) if confirmed else 0, slot.get("active_pid"), lost)


def slot_holder(queries: Queries, name: str) -> str:
    """Who reads from the slot at this moment, for a person."""
    rows = queries.call(_HOLDER, [name], doing="asking who holds the slot")
    return str(rows[0][0]) if rows else "a process that is just leaving"


def slot_in_use(queries: Queries, name: str, hint: str) -> SlotInUse:
    """The error that names the holder."""
    return SlotInUse(f"slot {name} is held by {slot_holder(queries, name)}", hint)


def require_slot(queries: Queries, name: str) -> Slot:
    """`find_slot`, or GapError if it is missing or lost."""
    return usable(name, find_slot(queries, name))


def usable(name: str, slot: Slot | None) -> Slot:
    if slot is None:
        raise GapError(f"slot {name} does not exist: rows may never have reached it", WAY_BACK)
    if slot.lost is not None:
        raise GapError(f"slot {name} is lost ({slot.lost}): rows are missing from it", WAY_BACK)
    return slot
