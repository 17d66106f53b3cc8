"""A relay's slot, publication and table under test: what an operator, a migration or an accident does to them."""

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol, Self

import psycopg
import pytest

from cdc_outbox.embedded import PostgresServer
from cdc_outbox.statements import identifier
from tests.fix_command import Command, Running
from tests.fix_kafka import Broker, CreateTopic, Record
from tests.fix_postgres import Database
from tests.relay_rig import RelayRig, Row
from tests.waiting import eventually

Done = subprocess.CompletedProcess[str]

# Everything that a run which changes nothing leaves as it is, row versions included.
_STATE = """
select jsonb_build_object(
    'relations', (select jsonb_agg(array[oid::text, relfilenode::text, xmin::text, relname] order by oid)
                  from pg_class where relnamespace::regnamespace::text !~ '^pg_|^information_schema'),
    'publications', (select jsonb_agg(array[p.oid::text, p.xmin::text, r.oid::text, r.xmin::text] order by p.oid, r.oid)
                     from pg_publication p left join pg_publication_rel r on r.prpubid = p.oid),
    'grants', (select jsonb_agg(array[relname::text, relacl::text] order by oid)
               from pg_class where relacl is not null and relnamespace = 'public'::regnamespace),
    'slots', (select jsonb_agg(to_jsonb(s) - array['safe_wal_size', 'inactive_since'] order by slot_name)
              from pg_replication_slots s where database = current_database())
)::text"""

_ROWS = "select coalesce(jsonb_agg(array[xmin::text, ctid::text, to_jsonb(t)::text] order by ctid)::text, '') from {} t"

# The same, without what two databases cannot have in common.
_SHAPE = """
select jsonb_build_object(
    'columns', (select jsonb_agg(array[attrelid::regclass::text, attname, format_type(atttypid, atttypmod),
                                       attnotnull::text, attidentity::text, attgenerated::text,
                                       pg_get_expr(adbin, adrelid)] order by attrelid::regclass::text, attnum)
                from pg_attribute left join pg_attrdef on adrelid = attrelid and adnum = attnum
                where attnum > 0 and attrelid in (select oid from pg_class where relnamespace = 'public'::regnamespace
                                                  and relkind in ('r', 'p'))),
    'constraints', (select jsonb_agg(array[conrelid::regclass::text, conname, pg_get_constraintdef(oid)]
                                     order by conrelid::regclass::text, conname)
                    from pg_constraint where connamespace = 'public'::regnamespace),
    'publication', (select jsonb_agg(to_jsonb(p) - 'oid' - 'pubname' || jsonb_build_object(
                        'table', prrelid::regclass, 'filter', prqual, 'columns', prattrs))
                    from pg_publication p join pg_publication_rel r on r.prpubid = p.oid),
    'slot', (select jsonb_agg(to_jsonb(s) - array['slot_name', 'database', 'xmin', 'catalog_xmin', 'restart_lsn',
                                                  'confirmed_flush_lsn', 'inactive_since', 'safe_wal_size', 'datoid'])
             from pg_replication_slots s where database = current_database()),
    'checkpoint', (select jsonb_agg(array[k.position = s.confirmed_flush_lsn, table_oid = 'outbox'::regclass,
                                          publication_oid = p.oid, publication_xmin = p.xmin::text,
                                          publication_rel_oid = r.oid, publication_rel_xmin = r.xmin::text])
                   from outbox_checkpoint k
                   left join pg_replication_slots s using (slot_name)
                   left join (pg_publication p join pg_publication_rel r on r.prpubid = p.oid) on true)
)::text"""


class SlotRig(RelayRig):
    """A RelayRig whose `init-slot` the test runs itself."""

    table = "outbox"
    user = "postgres"

    @property
    def dsn(self) -> str:
        return self.database.server.dsn(self.database.name, user=self.user)

    @property
    def names(self) -> list[str]:
        """The later --dsn wins."""
        return [*super().names, "--dsn", self.dsn, "--table", self.table]

    @property
    def backlog(self) -> int:
        return int(self.database.fetch_value(f"select count(*) from {self.table}"))

    # -- the commands -------------------------------------------------------------------------------------------

    def run(self, name: str, *options: object) -> Done:
        """`stream` ends by itself only when something is wrong."""
        return self.command.run(name, *(self.stream_options if name == "stream" else self.names), *options)

    def start_init(self, *options: object) -> Running:
        return self.command.start("init-slot", *self.names, *options)

    def refused(self, name: str, exit_code: int, *words: str) -> str:
        """`name` ends with `exit_code` and one line that has every one of `words`; the line."""
        return refusal(self.run(name), exit_code, *words)

    # -- the catalogue ------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.database.fetch_value(_STATE))
        for table in ("outbox", "outbox_checkpoint"):
            if self.database.fetch(
                "select from pg_class where oid = to_regclass(%s) and relkind in ('r', 'p')", (table,)
            ):
                found[table] = self.database.fetch_value(_ROWS.format(table))
        return found

    def shape(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.database.fetch_value(_SHAPE))
        return found

    def slot_exists(self) -> bool:
        query = "select count(*) from pg_replication_slots where slot_name = %s"
        return bool(self.database.fetch_value(query, (self.slot,)))

    def drop_slot(self) -> None:
        """By hand, whoever holds it: tried until no relay is quick enough to take it again."""

        def dropped() -> bool:
            try:
                self.database.execute(
                    "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s",
                    (self.slot,),
                )
                self.database.execute("select pg_drop_replication_slot(%s)", (self.slot,))
            except psycopg.errors.ObjectInUse:
                return False
            except psycopg.errors.UndefinedObject:
                return True
            return True

        eventually(dropped, 20, "the slot is dropped")

    def create_slot(self) -> None:
        """By hand."""
        self.database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (self.slot,))

    def alter(self, *statements: str) -> None:
        """`{publication}` is ours, quoted."""
        for statement in statements:
            self.database.execute(statement.format(publication=f'"{self.publication}"'))

    def numbers(self, records: list[Record]) -> list[int]:
        return [json.loads(record.value or b"")["n"] for record in records]


class Writer:
    """Inserts and commits without a pause, until the end."""

    def __init__(self, rig: SlotRig) -> None:
        self.rows: list[Row] = []
        self._rig = rig
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> Self:
        self._thread.start()
        eventually(lambda: len(self.rows) > 10, 10, "rows are written")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _write(self) -> None:
        with psycopg.connect(self._rig.database.socket_dsn) as connection:
            while not self._stop.is_set():
                written = self._rig.stage("writer", on=connection)
                connection.commit()
                self.rows.extend(written)


class NewRig(Protocol):
    def __call__(self, server: PostgresServer) -> SlotRig: ...


class NewRole(Protocol):
    def __call__(self, rig: SlotRig, attributes: str = "login", prefix: str = "role") -> str: ...


def refusal(done: Done, exit_code: int, *words: str) -> str:
    """One line that starts with `error:`, the exit code, no traceback; the line."""
    lines = done.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error:")]
    assert done.returncode == exit_code, f"exit {done.returncode}: {done.stderr}"
    assert errors == lines[-1:], done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in errors[0], f"no {word!r} in: {errors[0]}"
    return errors[0]


@pytest.fixture
def new_rig(
    new_database: Callable[[PostgresServer], Database], broker: Broker, command: Command, topic: CreateTopic
) -> NewRig:
    """On any server; nothing is set up there."""

    def new(server: PostgresServer) -> SlotRig:
        return SlotRig(new_database(server), broker, command, topic())

    return new


@pytest.fixture
def fresh(postgres: PostgresServer, new_rig: NewRig) -> SlotRig:
    """On the session's servers; nothing is set up there."""
    return new_rig(postgres)


@pytest.fixture
def ready(fresh: SlotRig) -> SlotRig:
    """The same, after `init-slot`."""
    fresh.init()
    return fresh


@pytest.fixture
def new_role() -> Iterator[NewRole]:
    """Makes a role, named `prefix` and the database, which the rig's database knows until the end of the test."""
    with ExitStack() as stack:

        def new(rig: SlotRig, attributes: str = "login", prefix: str = "role") -> str:
            name = f"{prefix}_{rig.database.name}"
            rig.database.execute(f"create role {identifier(name)} {attributes}")
            stack.callback(rig.database.execute, f"drop owned by {identifier(name)}; drop role {identifier(name)}")
            return name

        yield new
