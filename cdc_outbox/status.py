"""What `status` asks: where the slot stands, how long until it costs data or a full disk, and what waits.

One question per list. What this role may not see, or what is locked, is said in `unseen` and is no failure.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cdc_outbox.backlog import Waiting, parse_waiting, waiting_sql
from cdc_outbox.config import Settings
from cdc_outbox.conninfo import complete_conninfo
from cdc_outbox.errors import ConnectionLost, OutboxError, Stopped
from cdc_outbox.look import Look
from cdc_outbox.objects import Objects, resolve
from cdc_outbox.query import Row
from cdc_outbox.status_report import Lag, Status, TableState, behind, number, open_transactions, slot_state, wal_state
from cdc_outbox.wakeup import Wakeup

log = logging.getLogger("cdc_outbox.status")

COUNTED_DEAD_LETTERS = 10_000
LISTED_TRANSACTIONS = 5

_SERVER = """
select current_setting('server_version'), current_database(), pg_is_in_recovery()::text,
       to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'),
       case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_lsn() end,
       pg_size_bytes(current_setting('max_slot_wal_keep_size')),
       extract(epoch from current_setting('idle_replication_slot_timeout', true)::interval)"""

# As JSON: which columns there are depends on the version.
_SLOT = """
select to_jsonb(s) || jsonb_build_object(
           'held_by', format('pid %s (%s, %s%s)', s.active_pid, coalesce(nullif(a.application_name, ''), 'no name'),
                             coalesce(host(a.client_addr), 'local'),
                             to_char(a.backend_start, '", since" YYYY-MM-DD HH24:MI:SS')),
           'catalog_xmin_age', age(s.catalog_xmin), 'sent_lsn', r.sent_lsn,
           'inactive_seconds', extract(epoch from clock_timestamp() - (to_jsonb(s)->>'inactive_since')::timestamptz)),
       current_database()
from pg_replication_slots s
left join pg_stat_activity a on a.pid = s.active_pid
left join pg_stat_replication r on r.pid = s.active_pid
where s.slot_name = $1"""

# The last checkpoint's record says where the WAL ended at a known time, not long ago.
_RATE = """
select extract(epoch from clock_timestamp() - checkpoint_time), pg_wal_lsn_diff($1::pg_lsn, redo_lsn)
from pg_control_checkpoint()"""

# A transaction that has written holds restart_lsn back until it ends, in any database of the cluster, and a prepared
# one too. xact_start is for its own role and pg_read_all_stats; the age in transactions is for everyone.
TRANSACTIONS_SQL = """
select pid, gid, application, database, seconds, xids from (
    select pid, null as gid, application_name as application, datname as database,
           extract(epoch from clock_timestamp() - xact_start) as seconds, age(backend_xid) as xids
    from pg_stat_activity where backend_xid is not null and pid <> pg_backend_pid()
    union all
    select null, gid, null, database, extract(epoch from clock_timestamp() - prepared), age(transaction)
    from pg_prepared_xacts
) t order by xids desc, pid limit $1"""

_TABLES = """
select t.name, coalesce(sum(s.n_live_tup), 0), coalesce(sum(pg_total_relation_size(coalesce(p.relid, t.oid))), 0)
from (values ('outbox', to_regclass($1)), ('dead_letters', to_regclass($2)), ('archive', to_regclass($3))) t (name, oid)
left join lateral pg_partition_tree(t.oid) p on p.isleaf
left join pg_stat_all_tables s on s.relid = coalesce(p.relid, t.oid)
where t.oid is not null
group by 1"""

_DEAD_LETTERS = """
select count(*), extract(epoch from clock_timestamp() - min(created_at))
from (select created_at from {} order by id limit $1) first"""


class Watcher:
    """Looks at one slot and its tables, as often as asked, on one connection."""

    def __init__(self, settings: Settings, wakeup: Wakeup) -> None:
        """Raises ConfigError, ConnectionLost, Stopped."""
        self._settings = settings
        self._look = Look(complete_conninfo(settings.dsn), wakeup)
        self._unseen: list[str] = []

    def close(self) -> None:
        self._look.close()

    def status(self) -> Status:
        """Raises ConnectionLost if Postgres does not answer."""
        self._unseen = []
        version, database, in_recovery, at, position, limit, idle_timeout = self._look.call(
            _SERVER, doing="asking for settings"
        )[0]
        position = position or "0/0"
        raw = self._slot()
        slot = slot_state(self._settings.slot, raw, database)
        objects = self._objects()
        waiting = self._waiting(objects)
        tables = self._tables(objects)
        outbox = tables.get("outbox")
        return Status(
            at=at or "",
            server_version=version or "",
            database=database or "",
            in_recovery=in_recovery == "true",
            slot=slot,
            lag=Lag(behind(position, slot.confirmed_flush_lsn), waiting.seconds if waiting else None),
            wal=wal_state(
                slot,
                position,
                left=raw.get("safe_wal_size"),
                limit=number(limit),
                written=self._written(position),
                idle_timeout=number(idle_timeout),
            ),
            transactions=open_transactions(
                self._ask("open transactions", TRANSACTIONS_SQL, [LISTED_TRANSACTIONS]), raw
            ),
            outbox=_with_oldest(outbox, waiting),
            dead_letters=self._dead_letters(objects, tables.get("dead_letters")),
            archive=tables.get("archive"),
            unseen=tuple(self._unseen),
        )

    def _slot(self) -> dict[str, Any]:
        rows = self._look.call(_SLOT, [self._settings.slot], doing="reading pg_replication_slots")
        found: dict[str, Any] = json.loads(rows[0][0] or "{}") if rows else {}
        return found

    def _objects(self) -> Objects | None:
        settings = self._settings
        try:
            found = resolve(self._look, settings.table, settings.slot, settings.publication)
        except OutboxError as error:
            self._not_seen(f"table {settings.table}", error)
            return None
        if found is None:
            self._unseen.append(f"table {settings.table}: does not exist in this database, or not for this role")
        return found

    def _waiting(self, objects: Objects | None) -> Waiting | None:
        if objects is None:
            return None
        try:
            question = waiting_sql(self._look, objects)
            if question is None:
                self._unseen.append(f"how long rows wait: {objects.outbox} has no whole number as primary key")
                return None
            return parse_waiting(self._look.call(question, doing="looking")[0])
        except OutboxError as error:
            self._not_seen("how long rows wait", error)
            return None

    def _tables(self, objects: Objects | None) -> dict[str, TableState]:
        if objects is None:
            return {}
        names = {
            "outbox": objects.outbox,
            "dead_letters": objects.dead_letter,
            "archive": objects.archive,
        }
        rows = self._ask("the tables' sizes", _TABLES, list(names.values()))
        return {str(row[0]): TableState(names[str(row[0])], int(row[1] or 0), int(row[2] or 0)) for row in rows}

    def _dead_letters(self, objects: Objects | None, found: TableState | None) -> TableState | None:
        if objects is None or found is None:
            return found
        rows = self._ask("dead letters", _DEAD_LETTERS.format(objects.dead_letter), [COUNTED_DEAD_LETTERS])
        if not rows:
            return found
        counted = int(rows[0][0] or 0)
        return replace(
            found,
            rows=max(counted, found.rows) if counted == COUNTED_DEAD_LETTERS else counted,
            oldest_seconds=number(rows[0][1]),
        )

    def _written(self, position: str) -> tuple[float, float] | None:
        rows = self._ask("the rate of WAL", _RATE, [position])
        return (float(rows[0][0] or 0), float(rows[0][1] or 0)) if rows else None

    def _ask(self, what: str, query: str, parameters: Sequence[object]) -> list[Row]:
        """No rows, and a word in `unseen`, if that may not be seen."""
        try:
            return self._look.call(query, parameters, doing="looking")
        except OutboxError as error:
            self._not_seen(what, error)
            return []

    def _not_seen(self, what: str, error: OutboxError) -> None:
        if self._look.lost or isinstance(error, Stopped):
            raise error
        self._unseen.append(f"{what}: {str(error).removeprefix('looking: ')}")


def look(settings: Settings, wakeup: Wakeup, every: float | None, show: Callable[[Status], None]) -> None:
    """Once, or until stopped: then only the first look has to succeed. Raises ConfigError, ConnectionLost."""
    watcher: Watcher | None = None
    looked = False
    try:
        while not wakeup.stop_requested:
            try:
                watcher = watcher or Watcher(settings, wakeup)
                show(watcher.status())
                looked = True
            except ConnectionLost as error:
                if not looked or every is None:
                    raise
                log.warning("%s", error)
                if watcher is not None:
                    watcher.close()
                watcher = None
            if every is None:
                break
            wakeup.wait((), every)
    finally:
        if watcher is not None:
            watcher.close()


def _with_oldest(outbox: TableState | None, waiting: Waiting | None) -> TableState | None:
    if outbox is None or waiting is None:
        return outbox
    # Statistics may not know yet of a row that is there.
    rows = outbox.rows if waiting.oldest_seconds is None else max(1, outbox.rows)
    return replace(outbox, rows=rows, oldest_seconds=waiting.oldest_seconds)
