"""`init-slot`: table, publication, slot, checkpoint; and the way back when a slot is gone.

The way back is in the table: every row not yet purged is still there. Each is deleted and inserted again under its
own id, in one statement, so that old rows travel through the WAL like new ones. Repeats are allowed, gaps are not.

Why no row is missed at the seam: once slot and publication are there, a transaction that writes to the outbox is
decoded. One that wrote before, and is still open (or committed, and not visible yet), holds a lock on the table
until after it has become visible. So all such locks are waited for, and the snapshot of the requeue sees the rest.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cdc_outbox import progress, rewriting
from cdc_outbox.backoff import Backoff
from cdc_outbox.checkpoint import (
    OTHER_CLUSTER,
    OTHER_PUBLICATION,
    compare_sql,
    difference,
    parse_comparison,
    reset_sql,
)
from cdc_outbox.config import Settings
from cdc_outbox.conninfo import complete_conninfo
from cdc_outbox.errors import OutboxError, PreconditionError, Stopped
from cdc_outbox.objects import (
    Column,
    Objects,
    Slot,
    columns,
    find_slot,
    require,
    resolve,
    table_to_be,
)
from cdc_outbox.query import LONG_SECONDS, Queries, Row
from cdc_outbox.row_filter import row_filter, same
from cdc_outbox.statements import Fragment, identifier, literal, statements
from cdc_outbox.teardown import drop_slot
from cdc_outbox.wakeup import Wakeup

LONGEST_TABLE_NAME_BYTES = 63 - len("_dead_letter")
COUNTING = ("bigint", "integer", "smallint")
TELL_SECONDS = 2.0

_SERVER = """
select current_setting('server_version_num'), current_setting('wal_level'), pg_is_in_recovery()::text"""

_PUBLICATION = """
select p.pubinsert and not (p.pubupdate or p.pubdelete or p.pubtruncate) as insert_only,
       p.pubinsert, p.pubviaroot, p.puballtables,
       r.oid is not null and r.prattrs is null as all_columns, r.oid is not null as listed,
       (select count(*) from pg_publication_rel o where o.prpubid = p.oid and o.prrelid <> $2::oid)
       + (select count(*) from pg_publication_namespace n where n.pnpubid = p.oid) as others,
       coalesce(pg_get_expr(r.prqual, r.prrelid), 'true') as row_filter
from pg_publication p
left join pg_publication_rel r on r.prpubid = p.oid and r.prrelid = $2::oid
where p.pubname = $1"""

_COLUMNS = """
select attname from pg_attribute
where attrelid = $1::oid and attnum > 0 and not attisdropped and attgenerated = '' order by attnum"""

_TO_BE = [Column(name, "text", False, False) for name in ("task", "key")]
"""What of the table that tables.sql would make concerns a shard."""

_NOT_ARCHIVED = """
select attname, format_type(atttypid, atttypmod) from pg_attribute a
where attrelid = $1::oid and attnum > 0 and not attisdropped and to_regclass($2) is not null
  and not exists (select from pg_attribute b where b.attrelid = to_regclass($2) and b.attname = a.attname)
order by attnum"""

_DRY_LOCK = """-- Waits for all that wrote to the table before. (init-slot itself does so without holding up others.)
lock table """

# Who has written to the table and has not ended: the lock outlives the moment at which the rows become visible.
_WRITERS = """
select l.virtualtransaction,
       coalesce('pid ' || l.pid, 'prepared transaction') ||
       coalesce(' (' || nullif(a.application_name, '') || ')', '') ||
       coalesce(', open for ' || extract(epoch from now() - a.xact_start)::int || ' s', '')
from pg_locks l left join pg_stat_activity a on a.pid = l.pid
where l.locktype = 'relation' and l.database = (select oid from pg_database where datname = current_database())
  and l.relation in (select $1::oid::regclass union select relid from pg_partition_tree($1::oid::regclass))
  and l.mode = 'RowExclusiveLock' and l.granted and l.pid is distinct from pg_backend_pid()"""

_HELD = "select has_table_privilege($1::name, $2::text, $3::text)"

# A lock of this session, by two keys: ours, and the slot's name. Slots are the cluster's, such locks the database's; a
# slot is one database's too.
_ALONE = "select pg_try_advisory_lock(hashtext('cdc-outbox init-slot'), hashtext($1))"

_OTHER = """
select 'pid ' || pid from pg_locks
where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())
  and objsubid = 2 and objid = hashtext($1)::oid and granted"""

_OLDEST = """
select 'pid ' || pid || coalesce(' (' || nullif(application_name, '') || ')', '') ||
       ', open for ' || extract(epoch from now() - xact_start)::int || ' s'
from pg_stat_activity where backend_xid is not null and pid <> pg_backend_pid()
union all
select 'prepared transaction ' || gid || ', open for ' || extract(epoch from now() - prepared)::int || ' s'
from pg_prepared_xacts"""


@dataclass(slots=True)
class Report:
    """What `init-slot` did, in order: (thing, what happened to it)."""

    done: list[tuple[str, str]] = field(default_factory=list)
    requeued: int = 0
    position: str = ""
    sql: list[str] = field(default_factory=list)

    def as_json(self) -> str:
        return json.dumps({"done": dict(self.done), "requeued_rows": self.requeued, "position": self.position})


class Setup:
    """One run of `init-slot`. With `dry_run` nothing is changed: `report.sql` is what would be executed."""

    def __init__(
        self,
        settings: Settings,
        wakeup: Wakeup,
        *,
        dry_run: bool = False,
        failover: bool = False,
        wait_seconds: float = 60.0,
        app_role: str | None = None,
        relay_role: str | None = None,
        say: Callable[[str], None] = lambda line: None,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`say` hears what was done; `warn` hears what is being waited for."""
        self.settings = settings
        self.wakeup = wakeup
        self.dry_run = dry_run
        self.failover = failover
        self.wait_seconds = wait_seconds
        self.app_role = app_role
        self.relay_role = relay_role
        self.say = say
        self.warn = warn
        self.report = Report()
        self.deadline = 0.0
        self._conninfo = complete_conninfo(settings.dsn)

    def run(self) -> Report:
        """Raises PreconditionError, SlotInUse, Stopped, ConnectionLost."""
        self._queries = Queries(self._conninfo, self.wakeup)
        try:
            self._call("set synchronous_commit = local", doing="preparing")
            self._run()
        finally:
            self._queries.close()
        return self.report

    def _run(self) -> None:
        self.deadline = time.monotonic() + self.wait_seconds
        self._check_server()
        self._be_alone()
        # Before anything is changed: a slot of another kind ends it here.
        slot = find_slot(self._queries, self.settings.slot)
        objects = self._make_tables()
        self._choose_rows(objects)
        self._make_publication(objects)
        fate = self._judge(objects, slot)
        if slot is not None and fate.keep:
            self._did("slot", f"{objects.slot} was there")
        else:
            if slot is not None:
                self._drop_slot(objects, fate.reason or "")
            self._make_slot(objects)
        if fate.reason is not None:
            try:
                self._requeue(objects, fate)
            except OutboxError:
                if not fate.keep and not self.dry_run:
                    self._drop_orphan()
                raise
        self._grant(objects)

    # -- the parts ----------------------------------------------------------------------------------------------

    def _check_server(self) -> None:
        version, wal_level, in_recovery = self._call(_SERVER, doing="asking for settings")[0]
        self._version = int(version or 0)
        if int(version or 0) < 150000:
            raise PreconditionError("this server is older than PostgreSQL 15")
        if in_recovery == "true":
            raise PreconditionError("this server is a standby", "give the primary's address with --dsn")
        if int(version or 0) < 190000 and wal_level != "logical":
            raise PreconditionError(
                f"wal_level is {wal_level}", "alter system set wal_level = logical, then restart the server"
            )
        if self.failover and int(version or 0) < 170000:
            raise PreconditionError("--failover needs PostgreSQL 17 or later")

    def _be_alone(self) -> None:
        """Two relays that recover at the same time would drop each other's new slots."""
        if self.dry_run:
            return
        patience = _Patience(self, "waiting for another init-slot of this slot")
        backoff = Backoff(0.05, 0.5)
        while self._call(_ALONE, [self.settings.slot], doing="locking")[0][0] != "t":
            patience.spend(lambda: _column(self._call(_OTHER, [self.settings.slot], doing="looking at locks")))
            self.wakeup.wait((), backoff.next())

    def _make_tables(self) -> Objects:
        settings = self.settings
        found = resolve(self._queries, settings.table, settings.slot, settings.publication)
        objects = found or self._objects_to_be()
        if len(objects.table.encode()) > LONGEST_TABLE_NAME_BYTES:
            raise PreconditionError(
                f"the table's name is longer than {LONGEST_TABLE_NAME_BYTES} bytes",
                "the names beside it derive from it; give it a shorter one",
            )
        wanted = zip(
            ("table", "checkpoint", "dead letters", "archive", "archive's index"),
            (objects.outbox, objects.checkpoint, objects.dead_letter, objects.archive, objects.archived_at),
            statements("tables.sql", objects.names()),
            strict=True,
        )
        for thing, name, create in wanted:
            if self._call("select to_regclass($1)", [name], doing="looking for tables")[0][0] is None:
                self._execute(create, doing=f"creating {name}")
                self._did(thing, f"{name} created")
            else:
                self._did(thing, f"{name} was there")
        self._widen_archive(objects)
        if found is None and not self.dry_run:
            return require(self._queries, objects.outbox, settings.slot, settings.publication)
        return objects

    def _widen_archive(self, objects: Objects) -> None:
        """A column that the table got after the archive was made."""
        for name, kind in self._call(_NOT_ARCHIVED, [objects.oid, objects.archive], doing="reading columns"):
            add = f"alter table {objects.archive} add column {identifier(name or '')} {kind}"
            self._execute(add, doing=f"widening {objects.archive}")
            self._did("archive", f"column {name} added")

    def _objects_to_be(self) -> Objects:
        schema, name = table_to_be(self._queries, self.settings.table)
        return Objects(schema, name, 0, self.settings.slot, self.settings.publication)

    def _choose_rows(self, objects: Objects) -> None:
        """All of them, or those of our shard."""
        shard = self.settings.shard
        self._filter, self._where = "true", Fragment()
        if shard is not None:
            known = columns(self._queries, objects) or _TO_BE
            self._filter = row_filter(shard, known, self.settings.record_format())
            self._where = Fragment(f"where ({self._filter})")

    def _make_publication(self, objects: Objects) -> None:
        """Exactly our table, or our shard of it, inserts only; other tables that somebody added are left alone."""
        publication, table = identifier(objects.publication), objects.outbox
        rows = self._call(_PUBLICATION, [objects.publication, objects.oid], doing="reading the publication")
        if not rows:
            for create in statements("publication.sql", {**objects.names(), "where": self._where}):
                self._execute(create, doing="creating the publication")
            self._did("publication", f"{objects.publication} created")
            return
        only_inserts, inserts, via_root, all_tables, all_columns, listed = (value == "t" for value in rows[0][:6])
        others = int(rows[0][6] or 0)
        whole = all_columns and same(rows[0][7] or "", self._filter)
        if all_tables or (others and not inserts):
            what = "publishes all tables" if all_tables else "publishes other tables, and no inserts"
            raise PreconditionError(
                f"publication {objects.publication} {what}", "choose another name with --publication"
            )
        if others and not only_inserts and self.settings.shard is not None:
            # Postgres would refuse each update and delete of a table whose filter has columns outside its identity.
            raise PreconditionError(
                f"publication {objects.publication} publishes more than inserts, of other tables too",
                "choose another name with --publication",
            )
        mend = []
        if not via_root or (not only_inserts and not others):
            mend.append(
                f"alter publication {publication} set (publish = 'insert', publish_via_partition_root = true)"
                if not others
                else f"alter publication {publication} set (publish_via_partition_root = true)"
            )
        if listed and not whole:
            mend.append(f"alter publication {publication} drop table {table}")
        if not whole:
            mend.append(f"alter publication {publication} add table {table} {self._where}".rstrip())
        if mend:
            for statement in ("begin", *mend, "commit"):
                self._execute(statement, doing="mending the publication")
        beside = f", with {others} other tables or schemas, which the relay reads past" if others else ""
        self._did("publication", f"{objects.publication} {'mended' if mend else 'was there'}{beside}")

    def _judge(self, objects: Objects, slot: Slot | None) -> Fate:
        """Can this slot stay, and is there anything in the table that it may not carry?"""
        if slot is None:
            return Fate(False, "it was missing")
        if slot.lost is not None:
            return Fate(False, f"it was lost ({slot.lost})")
        if self._call("select to_regclass($1)", [objects.checkpoint], doing="looking")[0][0] is None:
            return Fate(False, "it was not made by init-slot")
        rows = self._call(compare_sql(objects), doing="reading the checkpoint")
        stored, coverage = parse_comparison(rows[0])
        if stored is None:
            return Fate(False, "it was not made by init-slot")
        if slot.confirmed_flush_lsn > stored.position:
            return Fate(False, "it was re-created or advanced by someone else")
        reason = difference(stored.coverage, coverage)
        if reason in (OTHER_CLUSTER, OTHER_PUBLICATION):
            # Decoding looks at the catalogue as of each WAL position: for changes before it was made, a new
            # publication does not exist, and PostgreSQL 15 to 17 stop there for ever.
            return Fate(False, reason)
        return Fate(True, reason, stored.position)

    def _drop_slot(self, objects: Objects, reason: str) -> None:
        self.report.sql.append(f"select pg_drop_replication_slot({literal(objects.slot)})")
        if not self.dry_run:
            drop_slot(self._queries, self.wakeup, objects.slot)
        self._did("old slot", f"{objects.slot} dropped: {reason}")

    def _make_slot(self, objects: Objects) -> None:
        limit = f"{int(min(self.wait_seconds + 10, LONG_SECONDS))}s"  # Postgres counts up to 24 days
        file = "slot_failover.sql" if self.failover else "slot.sql"
        *settings, create = statements(file, {**objects.names(), "limit": limit})
        for statement in settings:
            self._execute(statement, doing="preparing")
        if self.dry_run:
            self.report.sql.append(create)
        else:
            self._wait_for_slot(create)
        for reset in ("reset statement_timeout", "reset client_connection_check_interval"):
            self._execute(reset, doing="preparing")
        self._did("slot", f"{objects.slot} created")

    def _wait_for_slot(self, create: str) -> None:
        """Slot creation waits for every older transaction; say for which, and give up at the limit."""
        created: list[object] = []
        queries = self._queries
        patience = _Patience(self, "creating the slot")
        beside = Queries(self._conninfo, self.wakeup)  # first: a stop while it connects must find no slot in the making
        try:
            queries.ask(create, [], created.append, "creating the slot", self.wait_seconds + 30)
            while True:
                queries.wait(0.2)
                if created and queries.idle:
                    return
                try:
                    patience.spend(lambda: _column(beside.call(_OLDEST, doing="looking at transactions")))
                except OutboxError:
                    queries.cancel()
                    self._drop_orphan()  # it may have got through at this very moment
                    raise
        finally:
            beside.close()

    def _requeue(self, objects: Objects, fate: Fate) -> None:
        """Everything in the table goes through the WAL (again); from now on the slot covers the table."""
        self._wait_for_writers(objects)
        if fate.keep and forgets_a_mended_publication(self._version):
            # The entry made anew, now that the last such writer has ended: this, the walsender is told of.
            publication = identifier(objects.publication)
            drop = f"alter publication {publication} drop table {objects.outbox}"
            add = f"alter publication {publication} add table {objects.outbox} {self._where}".rstrip()
            for statement in ("begin", drop, add, "commit"):
                self._execute(statement, doing="making the publication's entry anew")
        writable = _column(self._call(_COLUMNS, [objects.oid], doing="reading the table's columns"))
        names = {
            **objects.names(),
            "columns": writable or ["id", "task", "args", "key", "headers", "created_at"],
            "where": Fragment(f"where {self._filter}" if self._where else ""),
            "order": self._order(objects),
        }
        self._execute("begin", doing="requeueing")
        with self._shown(objects):
            moved = self._execute(*statements("requeue.sql", names), doing="requeueing")
        stored = self._execute(reset_sql(objects, fate.position), doing="storing the checkpoint")
        self._execute("commit", doing="requeueing")
        self.report.requeued = int(moved[0][0] or 0) if moved else 0
        self.report.position = (stored[0][0] or "") if stored else ""
        self._did("checkpoint", f"stored at {self.report.position}")
        self._did("rows", f"{self.report.requeued} that were in the table go through the slot again")

    def _order(self, objects: Objects) -> Fragment:
        """By id, if it counts up; else as they stand."""
        name = self.settings.record_format().column("id")
        counts = any(column.name == name and column.type in COUNTING for column in columns(self._queries, objects))
        return Fragment(f"order by {identifier(name)}" if counts or not objects.oid else "")

    @contextlib.contextmanager
    def _shown(self, objects: Objects) -> Iterator[None]:
        if self.dry_run or not progress.wanted():
            yield
            return
        count = f"select count(*) from {objects.outbox} where {self._filter}"
        rows = self._queries.call(count, doing="counting rows", seconds=LONG_SECONDS)
        with rewriting.shown(self._conninfo, objects, "requeueing", int(rows[0][0] or 0)):
            yield

    def _wait_for_writers(self, objects: Objects) -> None:
        if self.dry_run:
            self.report.sql += ["begin", f"{_DRY_LOCK}{objects.outbox} in share mode", "commit"]
            return
        patience = _Patience(self, "waiting for transactions that wrote to the outbox before")
        backoff = Backoff(0.01, 0.5)
        before: set[str | None] | None = None
        while True:
            rows = self._call(_WRITERS, [objects.oid], doing="looking at locks")
            rows = [row for row in rows if before is None or row[0] in before]
            before = {row[0] for row in rows}
            if not before:
                return
            patience.spend(lambda rows=rows: [str(row[1]) for row in rows])  # type: ignore[misc]
            self.wakeup.wait((), backoff.next())

    def _grant(self, objects: Objects) -> None:
        for file, role, most in (
            ("role_app.sql", self.app_role, "INSERT"),
            ("role_relay.sql", self.relay_role, "DELETE"),
        ):
            if role is None:
                continue
            writable = _column(self._call(_COLUMNS, [objects.oid], doing="reading the table's columns"))
            names = {
                **objects.names(),
                "app_role": role,
                "relay_role": role,
                "column": (writable or ["id"])[0],
            }
            for statement in statements(file, names):
                self._execute(statement, doing=f"granting to {role}")
            # Postgres only warns if nothing could be granted.
            if not self.dry_run:
                held = self._call(_HELD, [role, objects.outbox, most], doing=f"granting to {role}")
                if held[0][0] != "t":
                    raise PreconditionError(
                        f"granting to {role}: {objects.outbox} is not this role's to grant",
                        "run init-slot as the table's owner",
                    )
            self._did("privileges", f"granted to {role}")

    def _drop_orphan(self) -> None:
        """A slot without a checkpoint serves nobody and holds WAL back: on the way out, take it along."""
        self._queries.close()
        self.wakeup.stop_requested = False
        self._queries = Queries(self._conninfo, self.wakeup)
        drop_slot(self._queries, self.wakeup, self.settings.slot)

    # -- small things ---------------------------------------------------------------------------------------------

    def _call(self, query: str, parameters: Sequence[object] = (), *, doing: str) -> list[Row]:
        """For questions, which a dry run asks too."""
        return self._queries.call(query, parameters, doing=doing)

    def _execute(self, statement: str, *, doing: str) -> list[Row]:
        """For what changes something."""
        self.report.sql.append(statement)
        if self.dry_run:
            return []
        return self._queries.call(statement, doing=doing, seconds=LONG_SECONDS)

    def _did(self, thing: str, what: str) -> None:
        self.report.done.append((thing, what))
        self.say(f"{thing}: {what}")


def forgets_a_mended_publication(version: int) -> bool:
    """Does decoding a writer from before an `alter publication` hide that change from what is decoded after it?

    Then the walsender remembers for good that the table is not published, and skips every row. Mended in 15.13, 16.9
    and 17.5, where a commit that changes the catalogue is told to the transactions that were running (seen on 16.4).
    """
    mended = {15: 150013, 16: 160009, 17: 170005}
    return version < mended.get(version // 10000, 0)


@dataclass(frozen=True, slots=True)
class Fate:
    """Whether a slot can stay, why rows must be requeued (None: they need not), and the position confirmed so far."""

    keep: bool
    reason: str | None
    position: int = 0


class _Patience:
    """Waits aloud, and not for ever."""

    def __init__(self, setup: Setup, what: str) -> None:
        self._setup = setup
        self._what = what
        self._tell_at = time.monotonic() + TELL_SECONDS

    def spend(self, whom: Callable[[], list[str]]) -> None:
        """Raises Stopped, or PreconditionError at the limit."""
        now = time.monotonic()
        if self._setup.wakeup.stop_requested:
            raise Stopped(f"stopped while {self._what}")
        if now > self._setup.deadline:
            raise PreconditionError(
                f"{self._what}: gave up after {self._setup.wait_seconds:.0f} s, behind {_listed(whom())}",
                "end that transaction, or give --wait more time; nothing was left behind",
            )
        if now > self._tell_at:
            self._tell_at = now + 5 * TELL_SECONDS
            self._setup.warn(f"{self._what}: behind {_listed(whom())}")


def _column(rows: list[Row]) -> list[str]:
    return [str(row[0]) for row in rows]


def _listed(whom: list[str]) -> str:
    return "; ".join(whom[:5]) or "a transaction that has just ended"
