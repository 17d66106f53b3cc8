"""What the checks of `doctor` want to know of Postgres: each fact asked for once, when the first check needs it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from cdc_outbox.checkpoint import check, compare_sql
from cdc_outbox.config import Settings
from cdc_outbox.conninfo import complete_conninfo
from cdc_outbox.errors import OutboxError, PreconditionError
from cdc_outbox.look import Look
from cdc_outbox.objects import Objects, require_slot, resolve
from cdc_outbox.pgoutput import Column, Relation
from cdc_outbox.query import Row
from cdc_outbox.wakeup import Wakeup

_PARAMETERS = "select name, setting from pg_settings"

_SLOTS = """
select to_jsonb(s) || jsonb_build_object(
           'catalog_xmin_age', age(s.catalog_xmin),
           'held_bytes', greatest(pg_wal_lsn_diff(w.position, s.restart_lsn), 0))
from pg_replication_slots s, (select case when pg_is_in_recovery() then pg_last_wal_replay_lsn()
                                          else pg_current_wal_lsn() end as position) w"""

_SENDERS = """
select to_jsonb(r) || jsonb_build_object('logical', s.slot_type = 'logical')
from pg_stat_replication r left join pg_replication_slots s on s.active_pid = r.pid"""

_PUBLICATION = """
select to_jsonb(p) || jsonb_build_object(
           'age', age(p.xmin), 'row_filter', pg_get_expr(r.prqual, r.prrelid), 'listed', r.oid is not null,
           'columns', (select jsonb_agg(a.attname order by a.attnum) from pg_attribute a
                       where a.attrelid = r.prrelid and a.attnum = any (r.prattrs)))
from pg_publication p
left join pg_publication_rel r on r.prpubid = p.oid and r.prrelid = $2::oid
where p.pubname = $1"""

# A domain counts as what it is made of.
_COLUMNS = """
select a.attname, a.atttypid, format_type(coalesce(nullif(t.typbasetype, 0), t.oid), null), a.attnotnull
from pg_attribute a join pg_type t on t.oid = a.atttypid
where a.attrelid = $1::oid and a.attnum > 0 and not a.attisdropped and a.attgenerated = '' order by a.attnum"""

_ROLE = "select to_jsonb(r) from pg_roles r where rolname = current_user"


class Facts:
    """Raises ConnectionLost when Postgres is gone, and other errors of ours where this role may not see."""

    def __init__(self, settings: Settings, wakeup: Wakeup) -> None:
        self.settings = settings
        self.wakeup = wakeup
        self.conninfo = complete_conninfo(settings.dsn)
        self.look = Look(self.conninfo, wakeup)

    def close(self) -> None:
        self.look.close()

    def ask(self, query: str, parameters: Sequence[object] = ()) -> list[Row]:
        return self.look.call(query, parameters, doing="looking")

    @cached_property
    def parameters(self) -> Mapping[str, str]:
        """The server's settings, in their own units (wal_sender_timeout in ms, max_slot_wal_keep_size in MB)."""
        return {str(name): setting or "" for name, setting in self.ask(_PARAMETERS)}

    @property
    def version(self) -> int:
        """The major."""
        return int(self.parameters["server_version_num"]) // 10000

    @cached_property
    def role(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = _documents(self.ask(_ROLE))[0]
        return found

    @cached_property
    def database(self) -> str:
        return str(self.ask("select current_database()")[0][0])

    @cached_property
    def slots(self) -> Sequence[Mapping[str, Any]]:
        """Every replication slot of the cluster: it is about their number, too."""
        return _documents(self.ask(_SLOTS))

    @property
    def slot(self) -> Mapping[str, Any] | None:
        return next((slot for slot in self.slots if slot["slot_name"] == self.settings.slot), None)

    @cached_property
    def gap(self) -> OutboxError | None:
        """What the checkpoint guard says, or None: the slot is the one that was set up, and still covers the table."""
        table = self.table
        try:
            # The slot first: the other way round a moving relay looks like a moved slot.
            slot = require_slot(self.look, table.slot)
            check(table, slot, self.ask(compare_sql(table))[0])
        except OutboxError as error:
            if self.look.lost:
                raise
            return error
        return None

    @cached_property
    def senders(self) -> Sequence[Mapping[str, Any]]:
        """Every walsender; what this role may not see of it is null."""
        return _documents(self.ask(_SENDERS))

    @cached_property
    def objects(self) -> Objects | None:
        settings = self.settings
        return resolve(self.look, settings.table, settings.slot, settings.publication)

    @property
    def table(self) -> Objects:
        """Raises PreconditionError if there is none."""
        if self.objects is None:
            raise PreconditionError(
                f"table {self.settings.table} does not exist in this database, or not for this role",
                "run `cdc-outbox init-slot`, or name it with --table",
            )
        return self.objects

    @cached_property
    def publication(self) -> Mapping[str, Any] | None:
        """With `row_filter`, `columns` (the column list) and `listed`, which concern our table."""
        oid = self.objects.oid if self.objects is not None else 0
        found = _documents(self.ask(_PUBLICATION, [self.settings.publication, oid]))
        return found[0] if found else None

    @cached_property
    def columns(self) -> Sequence[tuple[str, int, str, bool]]:
        """Name, type oid, type (a domain's base), not null."""
        rows = self.ask(_COLUMNS, [self.table.oid])
        return [(str(name), int(oid or 0), str(kind), required == "t") for name, oid, kind, required in rows]

    @property
    def relation(self) -> Relation:
        """As the stream would describe it."""
        columns = tuple(Column(name, oid) for name, oid, _, _ in self.columns)
        return Relation(self.table.oid, self.table.schema, self.table.table, columns)


def _documents(rows: list[Row]) -> list[dict[str, Any]]:
    return [json.loads(row[0] or "{}") for row in rows]
