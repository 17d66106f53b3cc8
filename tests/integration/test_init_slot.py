"""`init-slot` and `drop-slot`: what they make, what they leave alone, what they wait for, what they leave behind."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from tests.fix_command import Running
from tests.slot_rig import NewRole, SlotRig, Writer, refusal
from tests.waiting import eventually

THINGS = ["table", "checkpoint", "dead letters", "archive", "archive's index", "publication", "slot"]


def test_a_second_run_changes_nothing(ready: SlotRig) -> None:
    ready.stage(count=3)
    before = ready.state()
    done = ready.run("init-slot")
    assert done.returncode == 0
    assert ready.state() == before
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == THINGS
    assert done.stdout.count("was there") == len(THINGS)


def test_a_second_run_beside_a_relay_changes_nothing_either(ready: SlotRig) -> None:
    relay = ready.stream()
    rows = ready.stage(count=3)
    assert ready.run("init-slot").returncode == 0
    rows += ready.stage(count=3)
    assert len(ready.wait_for(rows)) == len(rows)
    assert relay.terminate() == 0


def test_a_dry_run_changes_nothing(fresh: SlotRig) -> None:
    before = fresh.state()
    assert fresh.run("init-slot", "--dry-run").returncode == 0
    assert fresh.state() == before


def test_a_dry_run_on_a_broken_setup_changes_nothing(ready: SlotRig) -> None:
    ready.stage(count=3)
    ready.alter("alter publication {publication} drop table outbox")
    before = ready.state()
    done = ready.run("init-slot", "--dry-run")
    assert done.returncode == 0
    assert "add table" in done.stdout
    assert ready.state() == before


def test_the_sql_of_a_dry_run_makes_what_init_slot_makes(ready: SlotRig) -> None:
    expected = ready.shape()
    ready.drop_slot()
    ready.alter("drop table outbox, outbox_checkpoint, outbox_dead_letter", "drop publication {publication}")
    script = ready.run("init-slot", "--dry-run").stdout
    psql = [str(ready.database.server.bindir / "psql"), "-Xq", "-v", "ON_ERROR_STOP=1", "-d", ready.database.dsn]
    done = subprocess.run(psql, input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ready.shape() == expected
    rows = ready.stage(count=3)
    ready.catch_up()
    assert len(ready.wait_for(rows)) == len(rows)


def test_the_sql_of_a_dry_run_sends_rows_that_are_there(ready: SlotRig) -> None:
    ready.drop_slot()
    rows = ready.stage(count=3)
    script = ready.run("init-slot", "--dry-run").stdout
    with psycopg.connect(ready.database.socket_dsn, autocommit=True) as connection:
        for statement in script.split(";\n"):
            if statement.strip():
                connection.execute(statement.encode())
    ready.catch_up()
    ready.wait_for(rows)


def test_json_says_what_was_done(fresh: SlotRig) -> None:
    first = json.loads(fresh.run("init-slot", "--json").stdout)
    assert set(first["done"]) == {*THINGS, "rows"}
    assert first["requeued_rows"] == 0
    assert first["position"] == fresh.database.fetch_value("select position::text from outbox_checkpoint")
    second = json.loads(fresh.run("init-slot", "--json").stdout)
    assert set(second["done"]) == set(THINGS)
    assert all("was there" in what for what in second["done"].values())


def test_a_failover_slot_where_the_server_has_them(fresh: SlotRig, postgres_major: int) -> None:
    if postgres_major < 17:
        refusal(fresh.run("init-slot", "--failover"), 3, "--failover needs PostgreSQL 17")
        assert not fresh.slot_exists()
        return
    fresh.init("--failover")
    assert fresh.database.fetch_value("select failover from pg_replication_slots where slot_name = %s", (fresh.slot,))


# -- waiting --------------------------------------------------------------------------------------------------------


@contextmanager
def transaction(rig: SlotRig, *statements: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """An open one of an application called slowpoke; rolled back at the end unless the test commits it."""
    connection = rig.database.connect(autocommit=False, application_name="slowpoke")
    for statement in statements:
        connection.execute(statement.encode())
    yield connection
    connection.rollback()


# The slot's creation waits for the first, the requeue for the second: a lock on the outbox without an xid.
SOME_XID = "select pg_current_xact_id()"
WRITER = "lock table outbox in row exclusive mode"
WAITS = {"slot": (SOME_XID, "creating the slot"), "writers": (WRITER, "waiting for transactions that wrote")}


def waiting_rig(rig: SlotRig, wait: str) -> None:
    """For `writers`: a table to have a lock on."""
    if wait == "writers":
        rig.init()
        rig.drop_slot()


def backends_of_init_slot(rig: SlotRig) -> int:
    query = "select count(*) from pg_stat_activity where datname = %s and application_name = 'cdc-outbox'"
    return int(rig.database.fetch_value(query, (rig.database.name,)))


@pytest.mark.parametrize("wait", WAITS)
def test_it_says_whom_it_waits_for(fresh: SlotRig, wait: str) -> None:
    waiting_rig(fresh, wait)
    statement, doing = WAITS[wait]
    with transaction(fresh, statement) as other:
        init = fresh.start_init()
        init.wait_for_log(f"{doing}")
        init.wait_for_log(f"behind pid {other.info.backend_pid} (slowpoke), open for ")
        other.commit()
        assert init.wait() == 0
    rows = fresh.stage(count=2)
    fresh.catch_up()
    fresh.wait_for(rows)


@pytest.mark.parametrize("wait", WAITS)
def test_the_limit_of_the_wait_leaves_no_slot_behind(fresh: SlotRig, wait: str) -> None:
    waiting_rig(fresh, wait)
    statement, doing = WAITS[wait]
    with transaction(fresh, statement) as other:
        done = fresh.run("init-slot", "--wait", "300ms")
        refusal(done, 3, doing, f"pid {other.info.backend_pid} (slowpoke), open for", "--wait")
        assert not fresh.slot_exists()
        eventually(lambda: not backends_of_init_slot(fresh), 5, "the backends are gone")


def test_a_prepared_transaction_is_named(fresh: SlotRig) -> None:
    fresh.alter("create table other (i int)")
    with transaction(fresh, "insert into other values (1)", f"prepare transaction '{fresh.slot}'"):
        refusal(fresh.run("init-slot", "--wait", "300ms"), 3, f"prepared transaction {fresh.slot}, open for")
    assert not fresh.slot_exists()


def test_no_patience_is_enough_when_there_is_nobody_to_wait_for(fresh: SlotRig) -> None:
    fresh.init("--wait", "0s")
    assert fresh.slot_exists()


@pytest.mark.parametrize("wait", WAITS)
def test_an_interrupt_leaves_no_slot_behind(fresh: SlotRig, wait: str) -> None:
    waiting_rig(fresh, wait)
    with transaction(fresh, WAITS[wait][0]):
        init = fresh.start_init()
        wait_until_it_waits(fresh, init, wait)
        init.signal(signal.SIGINT)
        init.wait(10)
        assert "Traceback" not in init.stderr_text()
        assert not fresh.slot_exists()


def test_a_kill_while_the_slot_is_being_made_leaves_no_slot_behind(fresh: SlotRig) -> None:
    with transaction(fresh, SOME_XID):
        init = fresh.start_init()
        wait_until_it_waits(fresh, init, "slot")
        init.kill9()
        # The server notices by itself, while the other transaction is still open.
        eventually(lambda: not backends_of_init_slot(fresh), 8, "the backends are gone")
        assert not fresh.slot_exists()


def test_a_kill_after_the_slot_was_made_is_mended_by_the_next_run(fresh: SlotRig) -> None:
    waiting_rig(fresh, "writers")
    with transaction(fresh, WRITER):
        init = fresh.start_init()
        wait_until_it_waits(fresh, init, "writers")
        init.kill9()
        rows = fresh.stage(count=3)
    fresh.refused("stream", 4, "init-slot")
    fresh.init()
    fresh.catch_up()
    fresh.wait_for(rows)


def wait_until_it_waits(rig: SlotRig, init: Running, wait: str) -> None:
    """Sooner than it says so itself."""
    made = "confirmed_flush_lsn is not null and active_pid is null"
    query = f"select {made if wait == 'writers' else 'true'} from pg_replication_slots where slot_name = %s"
    eventually(lambda: rig.database.fetch(query, (rig.slot,)) == [(True,)], 10, "it waits")
    assert init.running


def test_two_runs_at_once_make_one_setup(fresh: SlotRig) -> None:
    fresh.alter("create table outbox (id bigint generated always as identity, task text not null, args jsonb)")
    rows = fresh.stage(count=3)
    with transaction(fresh, SOME_XID) as other:
        inits = [fresh.start_init() for _ in range(3)]
        wait_until_it_waits(fresh, inits[0], "slot")
        other.commit()
        assert [init.wait() for init in inits] == [0, 0, 0], [init.stderr_text() for init in inits]
    assert sum("slot: " in init.stdout_text() and "created" in init.stdout_text() for init in inits) == 1
    rows += fresh.stage(count=3)
    fresh.catch_up()
    assert len(fresh.wait_for(rows)) == len(rows)


# -- rows that are there --------------------------------------------------------------------------------------------


TABLES = {
    "one of our own": "select 1",
    "partitioned": """
        create table outbox (id bigint generated always as identity, task text not null, args jsonb not null,
                             day date not null default current_date, primary key (id, day)) partition by range (day);
        create table outbox_past partition of outbox for values from (minvalue) to (current_date);
        create table outbox_now partition of outbox default""",
    "with a generated column and a dropped one": """
        create table outbox (gone text, id bigint generated always as identity primary key, task text not null,
                             args jsonb not null, size int generated always as (length(args::text)) stored);
        alter table outbox drop column gone""",
    "with a serial id and no key": "create table outbox (id bigserial, task varchar(80), args jsonb)",
}


@pytest.mark.parametrize("table", TABLES)
def test_rows_from_before_the_slot_and_across_its_creation_all_arrive(fresh: SlotRig, table: str) -> None:
    """C39 (lukashes/outboxx#145 and #146, disqus/pgshovel#16)."""
    fresh.alter(TABLES[table])
    fresh.init()
    fresh.drop_slot()
    rows = fresh.stage("before", 100)
    with Writer(fresh) as writer, transaction(fresh) as spanning:
        rows += fresh.stage("spanning", on=spanning)
        init = fresh.start_init()
        wait_until_it_waits(fresh, init, "slot")
        rows += fresh.stage("spanning", on=spanning)
        spanning.commit()
        assert init.wait() == 0, init.stderr_text()
        enough = len(writer.rows) + 10
        eventually(lambda: len(writer.rows) > enough, 10, "rows are written after it, too")
    fresh.catch_up()
    fresh.wait_for(rows + writer.rows)
    assert fresh.backlog == len(rows + writer.rows)
    ids = fresh.database.fetch_value("select count(distinct id) from outbox")
    assert ids == fresh.backlog


def test_a_writer_that_began_while_the_publication_lacked_the_table_is_waited_for(ready: SlotRig) -> None:
    """Its row is decoded with the publication of the moment of the insert, and so never comes by itself."""
    ready.alter("alter publication {publication} drop table outbox")
    with transaction(ready) as spanning:
        rows = ready.stage(on=spanning)
        init = ready.start_init()
        init.wait_for_log(
            f"waiting for transactions that wrote to the outbox before: behind pid {spanning.info.backend_pid}"
        )
        spanning.commit()
        assert init.wait() == 0
    ready.catch_up()
    ready.wait_for(rows)


def test_any_name_will_do(fresh: SlotRig) -> None:
    fresh.table = '"Odd Schema"."Out; ""Box"" \'x\' Ärger"'
    fresh.publication = fresh.publication.upper() + " \"%s\" 'x' \\"
    fresh.alter('create schema "Odd Schema"')
    fresh.init()
    query = f"insert into {fresh.table} (task, args) values ('odd', '{{\"n\": 0}}')"
    relay = fresh.stream("--purge-every", "200ms")
    fresh.database.execute(query)
    fresh.wait_for([("odd", 0)])
    eventually(lambda: fresh.backlog == 0, 10, "the row is purged")
    assert relay.terminate() == 0
    assert "was there" in fresh.run("init-slot").stdout
    fresh.drop_slot()
    fresh.database.execute(query)
    fresh.init()
    fresh.catch_up()
    assert len(fresh.read()) == 2


def test_a_bare_name_means_the_first_table_in_the_search_path(fresh: SlotRig, new_role: NewRole) -> None:
    fresh.alter("create schema app", f"alter database {fresh.database.name} set search_path = app, public")
    fresh.init()
    assert fresh.database.fetch_value("select to_regclass('app.outbox') is not null")
    fresh.alter("create table public.outbox (like app.outbox including all)")
    fresh.alter("insert into public.outbox (task, args) values ('other', '{{\"n\": 1}}')")
    rows = fresh.stage(count=2)
    fresh.catch_up()
    fresh.wait_for(rows)
    assert {record.headers["task"] for record in fresh.read()} == {b"mail"}


def test_a_publication_made_by_hand_is_mended(fresh: SlotRig) -> None:
    """As in old guides: default options, which publish deletes too, and would refuse those of a table without a key."""
    fresh.alter(
        "create table outbox (id int default 1, task text, args jsonb)",
        "create publication {publication} for table outbox",
    )
    fresh.init()
    query = "select pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot from pg_publication"
    assert fresh.database.fetch(query) == [(True, False, False, False, True)]
    rows = fresh.stage(count=2)
    fresh.alter("delete from outbox")
    fresh.catch_up()
    fresh.wait_for(rows)


# -- roles ----------------------------------------------------------------------------------------------------------

WRONG_FOR_APP = [
    "select * from outbox",
    "update outbox set task = 'x'",
    "delete from outbox",
    "truncate outbox",
    "select * from outbox_checkpoint",
    "select * from outbox_dead_letter",
    "create table other (i int)",
]
WRONG_FOR_RELAY = [
    "insert into outbox (task) values ('x')",
    "update outbox set task = 'x'",
    "update outbox set args = '{}'",
    "truncate outbox",
    "delete from outbox_checkpoint",
    "insert into outbox_checkpoint values ('x', '0/0', '', 0, 0, '', 0, '')",
    "truncate outbox_checkpoint",
    "update outbox_dead_letter set error = ''",
    "drop table outbox",
    "alter table outbox disable row level security",
    "select * from secret",
    "create table other (i int)",
]


def denied(rig: SlotRig, role: str, statements: list[str]) -> None:
    with psycopg.connect(rig.database.server.socket_dsn(rig.database.name, user=role), autocommit=True) as connection:
        for statement in statements:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.encode())


@pytest.mark.parametrize("prefix", ["plain", "Odd \"role\"; 'x'"])
def test_the_roles_can_do_their_work_and_nothing_else(fresh: SlotRig, new_role: NewRole, prefix: str) -> None:
    app = new_role(fresh, prefix=f"{prefix} app")
    relay_role = new_role(fresh, "login replication", prefix=f"{prefix} relay")
    fresh.alter("create table secret (s text)")
    done = fresh.run("init-slot", "--app-role", app, "--relay-role", relay_role)
    assert done.returncode == 0, done.stderr
    assert f"granted to {app}" in done.stdout
    assert f"granted to {relay_role}" in done.stdout
    with psycopg.connect(fresh.database.server.socket_dsn(fresh.database.name, user=app)) as connection:
        rows = fresh.stage(count=2, on=connection)
    fresh.user = relay_role
    relay = fresh.stream("--purge-every", "200ms", "--check-every", "200ms")
    fresh.wait_for(rows)
    eventually(lambda: fresh.backlog == 0, 10, "rows are purged")
    rows = fresh.stage(count=1)
    fresh.wait_for(rows)
    assert fresh.run("purge").returncode == 0
    assert relay.terminate() == 0
    denied(fresh, app, WRONG_FOR_APP)
    denied(fresh, relay_role, WRONG_FOR_RELAY)


def test_the_relay_role_can_set_dead_letters_aside(fresh: SlotRig, new_role: NewRole) -> None:
    fresh.user = "postgres"
    role = new_role(fresh, "login replication")
    fresh.init("--relay-role", role)
    fresh.user = role
    fresh.alter("insert into outbox (task, args) select 'big', to_jsonb(repeat('x', 1500000))")
    rows = fresh.stage(count=2)
    fresh.catch_up("--on-poison", "dead-letter")
    fresh.wait_for(rows)
    assert fresh.database.fetch("select task from outbox_dead_letter") == [("big",)]


# -- drop-slot and purge --------------------------------------------------------------------------------------------


def test_drop_slot_asks_first(ready: SlotRig) -> None:
    ready.stage(count=3)
    before = ready.state()
    for answer in ("n\n", "", "\n"):
        done = ready.command.run("drop-slot", *ready.names, input=answer)
        assert "public" in done.stdout
        assert "3 rows not purged" in done.stdout
        assert "nothing was dropped" in done.stdout
        assert ready.state() == before
    assert ready.command.run("drop-slot", *ready.names, input="y\n").returncode == 0
    assert not ready.slot_exists()


def test_drop_slot_forgets_the_checkpoint_and_keeps_the_rows(ready: SlotRig) -> None:
    rows = ready.stage(count=3)
    done = ready.run("drop-slot", "--yes")
    assert done.returncode == 0
    assert "init-slot" in done.stdout
    assert not ready.slot_exists()
    assert ready.database.fetch("select * from outbox_checkpoint") == []
    assert ready.backlog == 3
    again = ready.run("drop-slot", "--yes")
    assert again.returncode == 0
    assert "does not exist" in again.stdout
    ready.refused("stream", 4, "does not exist", "init-slot")
    ready.refused("purge", 4, "does not exist", "init-slot")
    assert "3 that were in the table" in ready.run("init-slot").stdout
    ready.catch_up()
    ready.wait_for(rows)


def test_drop_slot_leaves_a_slot_that_a_relay_holds(ready: SlotRig) -> None:
    relay = ready.stream()
    before = ready.database.fetch("select slot_name from outbox_checkpoint")
    (pid,) = ready.database.fetch("select active_pid from pg_replication_slots where slot_name = %s", (ready.slot,))[0]
    refusal(ready.run("drop-slot", "--yes"), 6, f"held by pid {pid} (cdc-outbox", "stop that relay")
    assert ready.slot_exists()
    assert ready.database.fetch("select slot_name from outbox_checkpoint") == before
    rows = ready.stage(count=2)
    ready.wait_for(rows)
    assert relay.terminate() == 0


def test_purge_once(ready: SlotRig) -> None:
    relay = ready.stream()
    rows = ready.stage(count=5)
    ready.wait_for(rows)
    assert ready.purge("--dry-run") == "5 rows would be purged\n"
    assert ready.backlog == 5
    assert ready.purge() == "5 rows purged\n"
    assert ready.backlog == 0
    assert ready.purge() == "0 rows purged\n"
    stored, confirmed = ready.database.fetch(
        "select position >= confirmed_flush_lsn, confirmed_flush_lsn is not null"
        " from outbox_checkpoint join pg_replication_slots using (slot_name)"
    )[0]
    assert stored
    assert confirmed
    assert relay.terminate() == 0
