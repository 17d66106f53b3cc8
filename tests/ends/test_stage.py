"""Staging on connections of every client library, against a real server."""

import contextlib
import json
import subprocess
import sys
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy
import sqlalchemy.orm
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from cdc_outbox import Job, NotInTransaction, stage, stage_many
from tests.ends.clients import KINDS
from tests.ends.conftest import OpenClient
from tests.fix_postgres import Database
from tests.relay_rig import RelayRig

every_client = pytest.mark.parametrize("kind", KINDS)

ARGS: tuple[Any, ...] = (
    {"order": 42, "lines": [{"price": "1.10", "paid": True}, None], "note": 'ü 🐘 " \\ \n'},
    [],
    (1, 2),
    "",
    "text",
    0,
    -1.5,
    2**70,
    False,
    None,
)


class Undone(Exception):
    """Makes a transaction roll back."""


def rows(database: Database, columns: str = "task, args") -> list[tuple[Any, ...]]:
    return database.fetch(f"select {columns} from outbox order by id")


# -- the transaction --------------------------------------------------------------------------------------------------


@every_client
def test_a_job_commits_with_the_callers_transaction(kind: str, tables: Database, open_client: OpenClient) -> None:
    client = open_client(kind, tables)
    with client.transaction():
        row_id = client.wait(stage(client.connection, "mail", {"to": 7}, key="c7", headers={"tenant": "ü"}))
        assert rows(tables) == []
    assert rows(tables, "id, task, args, key, headers") == [(row_id, "mail", {"to": 7}, "c7", {"tenant": "ü"})]


@every_client
def test_a_job_vanishes_with_the_callers_transaction(kind: str, tables: Database, open_client: OpenClient) -> None:
    client = open_client(kind, tables)
    with contextlib.suppress(Undone), client.transaction():
        client.wait(stage(client.connection, "mail", {}))
        client.wait(stage_many(client.connection, [Job("mail", {}), Job("mail", {})]))
        raise Undone
    with client.transaction():
        client.wait(stage(client.connection, "kept", {}))
    assert rows(tables) == [("kept", {})]


@every_client
def test_outside_a_transaction_nothing_is_staged(kind: str, tables: Database, open_client: OpenClient) -> None:
    client = open_client(kind, tables, autocommit=True)
    with pytest.raises(NotInTransaction, match="no transaction open"):
        client.wait(stage(client.connection, "mail", {}))
    with pytest.raises(NotInTransaction):
        client.wait(stage_many(client.connection, [Job("mail", {})]))
    assert rows(tables) == []


@every_client
def test_many_jobs_are_one_statement_in_their_order(kind: str, tables: Database, open_client: OpenClient) -> None:
    client = open_client(kind, tables)
    jobs = [Job(f"task {n}", {"n": n}, key=f"k{n % 3}" if n % 2 else None) for n in range(500)]
    with client.transaction():
        ids = client.wait(stage_many(client.connection, iter(jobs)))
    assert rows(tables, "id, task, args, key, headers") == [
        (row_id, job.task, job.args, job.key, None) for row_id, job in zip(ids, jobs, strict=True)
    ]
    # The number of the statement within its transaction.
    assert tables.fetch_value("select count(distinct cmin::text) from outbox") == 1


@every_client
def test_args_arrive_as_they_were_given(kind: str, tables: Database, open_client: OpenClient) -> None:
    client = open_client(kind, tables)
    with client.transaction():
        client.wait(stage_many(client.connection, [Job("t", args) for args in ARGS]))
        client.wait(stage_many(client.connection, []))
    expected = [json.loads(json.dumps(args)) for args in ARGS]
    assert [json.loads(text) for (text,) in rows(tables, "args::text")] == expected
    assert tables.fetch_value("select count(*) from outbox where args = 'null'") == 1


def test_psycopg_without_autocommit_begins_by_itself(tables: Database) -> None:
    connection = tables.connect(autocommit=False)
    stage(connection, "mail", {})
    assert rows(tables) == []
    connection.commit()
    assert rows(tables) == [("mail", {})]


def test_a_job_vanishes_with_its_savepoint(tables: Database) -> None:
    connection = tables.connect()
    with connection.transaction():
        stage(connection, "kept", {})
        with contextlib.suppress(Undone), connection.transaction():
            stage(connection, "undone", {})
            raise Undone
    assert rows(tables) == [("kept", {})]


def test_a_failed_transaction_stays_the_callers_error(tables: Database) -> None:
    connection = tables.connect(autocommit=False)
    with pytest.raises(psycopg.errors.DivisionByZero):
        connection.execute("select 1 / 0")
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        stage(connection, "mail", {})


@pytest.mark.parametrize("factory", [psycopg.Cursor, psycopg.ClientCursor, psycopg.RawCursor])
def test_psycopgs_own_settings_do_not_matter(factory: type[psycopg.Cursor[Any]], tables: Database) -> None:
    connection = tables.connect()
    connection.row_factory = psycopg.rows.dict_row
    connection.cursor_factory = factory
    with connection.transaction():
        assert stage(connection, "mail", {"n": 1}) == 1
    assert rows(tables) == [("mail", {"n": 1})]


def test_a_pipeline_is_not_taken_for_a_transaction(tables: Database) -> None:
    connection = tables.connect()
    with connection.pipeline():
        connection.execute("select 1")
        with pytest.raises(NotInTransaction):
            stage(connection, "mail", {})
    assert rows(tables) == []


def test_a_json_codec_of_the_applications_own_does_not_matter(tables: Database, open_client: OpenClient) -> None:
    client = open_client("asyncpg", tables)
    for name in ("json", "jsonb"):
        codec = {"encoder": json.dumps, "decoder": json.loads, "schema": "pg_catalog"}
        client.wait(client.connection.set_type_codec(name, **codec))
    with client.transaction():
        client.wait(stage(client.connection, "mail", {"n": 1}))
    assert rows(tables) == [("mail", {"n": 1})]


def test_a_session_that_must_be_begun_is_not_begun_for_the_caller(tables: Database, open_client: OpenClient) -> None:
    engine = open_client("SQLAlchemy", tables).connection.engine
    with sqlalchemy.orm.Session(engine, autobegin=False) as session:
        with pytest.raises(NotInTransaction):
            stage(session, "mail", {})
        with session.begin():
            stage(session, "mail", {})
    assert rows(tables) == [("mail", {})]


def test_the_table_is_named_as_in_sql(own_tables: Database) -> None:
    own_tables.execute("create schema app; create table app.jobs (like outbox including all)")
    own_tables.execute('create table app."More Jobs" (like outbox including all)')
    connection = own_tables.connect()
    with connection.transaction():
        stage(connection, "a", {}, table="app.jobs")
        stage(connection, "b", {}, table='APP."More Jobs"')
    assert own_tables.fetch("""select task from app.jobs union all select task from app."More Jobs" """) == [
        ("a",),
        ("b",),
    ]
    for name in ("", "outbox; drop table outbox", "outbox (task) --", 'a"b', '"a""', "a.b.c", "a b", '"%s"', '"$1"'):
        with pytest.raises(ValueError, match="no table's name"):
            stage(connection, "a", {}, table=name)


def test_a_role_may_insert_and_see_its_ids_and_nothing_else(own_tables: Database) -> None:
    role = f"app_{own_tables.name}"
    own_tables.execute(f"create role {role}")
    own_tables.execute(f"grant insert, select (id) on outbox to {role}")
    try:
        connection = own_tables.connect()
        connection.execute(f"set role {role}".encode())
        with connection.transaction():
            assert stage_many(connection, [Job("a", {}), Job("b", {})]) == [1, 2]
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("select args from outbox")
        connection.close()
    finally:
        own_tables.execute(f"drop owned by {role}; drop role {role}")


# -- arguments --------------------------------------------------------------------------------------------------------

LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("args", "kind", "message"),
    [
        ({"order": {"total": 1j}}, TypeError, "args.order.total is a complex"),
        ({"lines": [{}, {"when": object()}]}, TypeError, r"args.lines\[1\].when is a object"),
        ({"a b": {1, 2}}, TypeError, r"args\['a b'\] is a set"),
        ({"n": {7: "x"}}, TypeError, "args.n has a key that is a int"),
        ([float("nan")], TypeError, r"args\[0\] is nan"),
        ({"x": float("-inf")}, TypeError, "args.x is -inf"),
        (b"bytes", TypeError, "args is a bytes"),
        ({"secret": "a\0b"}, ValueError, "args.secret holds a zero character"),
        ({"a": {"x\0": 1}}, ValueError, "a key of args.a holds a zero"),
        (["\ud800"], ValueError, r"args\[0\] holds half of a surrogate"),
        (LOOP, ValueError, "nested too deeply, or holds itself"),
    ],
)
def test_args_that_are_not_json_are_refused_by_their_place(args: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as raised:
        stage(object(), "mail", args)
    assert "a\0b" not in str(raised.value)


@pytest.mark.parametrize("name", ["task", "key"])
def test_a_task_or_key_has_1_to_255_bytes(name: str, tables: Database) -> None:
    connection = tables.connect(autocommit=False)

    def try_with(value: Any) -> None:
        given: dict[str, Any] = {"task": "t", "args": {}, name: value}
        stage(connection, **given)

    for value in ("", "x" * 256, "ü" * 128):
        with pytest.raises(ValueError, match=f"{name} has {len(value.encode())} bytes; 1 to 255"):
            try_with(value)
    with pytest.raises(ValueError, match=f"{name} holds a zero"):
        try_with("a\0")
    with pytest.raises(TypeError, match=f"{name} is a int"):
        try_with(7)
    try_with("ü" * 127)


@pytest.mark.parametrize(
    ("headers", "kind", "message"),
    [
        ({"n": 7}, TypeError, "headers.n is a int"),
        ({"id": "7"}, ValueError, "headers.id is set by the relay"),
        ({"commit_lsn": ""}, ValueError, "headers.commit_lsn is set by the relay"),
        ({"x": "\0"}, ValueError, "headers.x holds a zero"),
    ],
)
def test_headers_are_strings_and_not_the_relays(headers: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        stage(object(), "mail", {}, headers=headers)


def test_what_is_no_connection_is_refused_by_its_name(tables: Database, open_client: OpenClient) -> None:
    connection = tables.connect()
    client = open_client("asyncpg pool", tables)
    engine = open_client("SQLAlchemy", tables).connection.engine
    others = [object(), None, connection.cursor(), engine, sqlalchemy.orm.sessionmaker(engine), client.pool]  # type: ignore[attr-defined]
    for other in others:
        with pytest.raises(TypeError, match=f"{type(other).__qualname__} is no connection of"):
            stage(other, "mail", {})
    assert isinstance(client.pool, asyncpg.Pool)  # type: ignore[attr-defined]


# -- what it imports --------------------------------------------------------------------------------------------------

FOREIGN = ("psycopg", "confluent_kafka", "asyncpg", "sqlalchemy", "django", "opentelemetry", "click")


def imported(code: str) -> set[str]:
    code += f"; import sys; print([name for name in {FOREIGN} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.replace("'", '"')))


def test_the_package_imports_no_library_and_nothing_of_the_relay() -> None:
    ours = {"cdc_outbox", "cdc_outbox.clients", "cdc_outbox.inbox", "cdc_outbox.stage"}
    code = "import sys, cdc_outbox; cdc_outbox.stage; cdc_outbox.Inbox"
    code += f"; assert {{name for name in sys.modules if name.split('.')[0] == 'cdc_outbox'}} == {ours}"
    assert imported(code) == set()


def test_staging_imports_no_library_but_the_callers(tables: Database) -> None:
    code = f"""import psycopg, cdc_outbox
with psycopg.connect({tables.socket_dsn!r}) as connection: cdc_outbox.stage(connection, "mail", {{}})
pass"""
    assert imported(code) == {"psycopg"}
    assert rows(tables) == [("mail", {})]


def test_the_submodule_does_not_hide_the_function() -> None:
    code = "import cdc_outbox.stage, cdc_outbox.inbox, cdc_outbox; assert cdc_outbox.stage.__name__ == 'stage'"
    assert imported(f"{code}; assert callable(cdc_outbox.stage)") == set()


# -- the trace context ------------------------------------------------------------------------------------------------

SPAN = NonRecordingSpan(
    SpanContext(
        trace_id=0x0AF7651916CD43DD8448EB211C80319C,
        span_id=0x00F067AA0BA902B7,
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=TraceState([("vendor", "x"), ("other", "y")]),
    )
)
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"


def test_the_trace_context_of_the_current_span_comes_through_the_relay(rig: RelayRig) -> None:
    connection = rig.database.connect(autocommit=False)
    with trace.use_span(SPAN):
        stage(connection, "mail", {}, headers={"tenant": "7"})
    stage(connection, "mail", {}, headers={"tenant": "8"})
    connection.commit()
    rig.catch_up()
    traced, plain = rig.read()
    assert traced.headers["traceparent"] == TRACEPARENT.encode()
    assert traced.headers["tracestate"] == b"vendor=x,other=y"
    assert traced.headers["tenant"] == b"7"
    assert plain.headers.keys() == {"id", "task", "commit_lsn", "tenant"}


def test_a_trace_context_that_the_caller_gives_is_left_alone(tables: Database) -> None:
    connection = tables.connect(autocommit=False)
    with trace.use_span(SPAN):
        stage(connection, "mail", {}, headers={"traceparent": "00-mine"})
    connection.commit()
    assert rows(tables, "headers") == [({"traceparent": "00-mine"},)]
