"""Each thing that is not set up is one line with its remedy and exit 3, and costs nothing."""

import psycopg
import pytest

from tests.fix_postgres import StartPostgres
from tests.slot_rig import NewRig, NewRole, SlotRig, refusal

TABLE = "create table outbox (id bigint generated always as identity primary key, task text, args jsonb)"
COMMANDS = ["init-slot", "stream", "purge"]


def test_wal_level(postgres_server: StartPostgres, new_rig: NewRig) -> None:
    """C38 (aws/pgactive#176, PeerDB-io/peerdb#4649, airbytehq/airbyte#23330)."""
    rig = new_rig(postgres_server(wal_level="replica"))
    before = rig.state()
    rig.refused("init-slot", 3, "wal_level is replica", "alter system set wal_level = logical")
    assert rig.state() == before
    rig.alter(TABLE)
    rig.refused("stream", 3, "wal_level is replica", "alter system set wal_level = logical")


def test_no_free_slot_and_no_free_walsender(postgres_server: StartPostgres, new_rig: NewRig) -> None:
    """C38 (aws/pgactive#176, PeerDB-io/peerdb#4649, airbytehq/airbyte#23330)."""
    rig = new_rig(postgres_server(max_replication_slots=1, max_wal_senders=1))
    rig.alter("select pg_create_physical_replication_slot('taken')")
    for _ in range(10):
        rig.refused("init-slot", 3, "creating the slot", "max_replication_slots")
    assert rig.database.fetch("select slot_name from pg_replication_slots") == [("taken",)]
    rig.alter("select pg_drop_replication_slot('taken')")
    rig.init()
    rows = rig.stage(count=2)
    with psycopg.connect(rig.database.server.dsn(rig.database.name, replication="database"), autocommit=True):
        rig.refused("stream", 3, "max_wal_senders", "hint: ")
    rig.catch_up()
    rig.wait_for(rows)


def test_a_role_without_replication(ready: SlotRig, new_role: NewRole) -> None:
    """C38 (aws/pgactive#176, PeerDB-io/peerdb#4649, airbytehq/airbyte#23330)."""
    role = new_role(ready)
    assert ready.run("init-slot", "--relay-role", role).returncode == 0
    ready.user = role
    ready.refused("stream", 3, "REPLICATION")
    ready.user = "postgres"
    ready.drop_slot()
    ready.alter(f"grant all on schema public to {role}", f"alter table outbox owner to {role}")
    ready.alter(f"alter publication {{publication}} owner to {role}", f"alter table outbox_checkpoint owner to {role}")
    ready.user = role
    ready.refused("init-slot", 3, "creating the slot", "hint: ", "REPLICATION")
    assert not ready.slot_exists()


def test_a_role_without_create(fresh: SlotRig, new_role: NewRole) -> None:
    fresh.user = new_role(fresh, "login replication")
    before = fresh.state()
    fresh.refused("init-slot", 3, "creating", "permission denied", "hint: ")
    assert fresh.state() == before


def test_a_relay_role_without_its_grants(ready: SlotRig, new_role: NewRole) -> None:
    """C38 (aws/pgactive#176, PeerDB-io/peerdb#4649, airbytehq/airbyte#23330)."""
    ready.user = new_role(ready, "login replication")
    before = ready.state()
    for name in ("stream", "purge"):
        ready.refused(name, 3, "permission denied", "role_relay.sql")
    ready.user = "postgres"
    assert ready.state() == before


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_table_and_what_is_no_table(fresh: SlotRig, name: str) -> None:
    if name != "init-slot":
        fresh.refused(name, 3, "table outbox does not exist", "init-slot")
    fresh.alter("create view outbox as select 1 as id")
    before = fresh.state()
    fresh.refused(name, 3, "outbox is not a table", "--table")
    assert fresh.state() == before
    fresh.table = "one.two.three.four"
    fresh.refused(name, 2, "one.two.three.four", "SCHEMA.NAME")


def logical(plugin: str, more: str = "") -> str:
    return f"select pg_create_logical_replication_slot('{{slot}}', '{plugin}'{more})"


SLOTS = {
    "physical": ("select pg_create_physical_replication_slot('{slot}')", "slot_type = physical"),
    "of another plugin": (logical("test_decoding"), "plugin = test_decoding"),
    "two_phase": (logical("pgoutput", ", twophase => true"), "two_phase = True"),
}


@pytest.mark.parametrize("kind", SLOTS)
def test_a_slot_of_another_kind(ready: SlotRig, kind: str) -> None:
    create, word = SLOTS[kind]
    ready.drop_slot()
    rows = ready.stage(count=2)
    try:
        ready.alter(create.format(slot=ready.slot))
    except psycopg.errors.UndefinedFile:
        pytest.skip("this PostgreSQL comes without test_decoding")
    slots = "select to_jsonb(s) from pg_replication_slots s where slot_name = %s"
    before = ready.state(), ready.database.fetch(slots, (ready.slot,))
    try:
        for name in (*COMMANDS, "drop-slot"):
            ready.refused(name, 3, word, "--slot")
        refusal(ready.run("stream", "--on-gap", "recover"), 3, word, "--slot")
        assert (ready.state(), ready.database.fetch(slots, (ready.slot,))) == before
        assert ready.backlog == len(rows)
    finally:
        ready.drop_slot()


def test_a_slot_of_another_database(ready: SlotRig, new_rig: NewRig) -> None:
    other = new_rig(ready.database.server)
    other.slot = ready.slot
    rows = ready.stage(count=2)
    for name in (*COMMANDS, "drop-slot"):
        if name in ("stream", "purge"):
            other.alter(TABLE.replace("create table", "create table if not exists"))
        other.refused(name, 3, f"database = {ready.database.name}", "--slot")
    ready.catch_up()
    ready.wait_for(rows)


PUBLICATIONS = {
    "for all tables": ("create publication {publication} for all tables", "publishes all tables"),
    "deletes of another table": (
        "create table other (i int); create publication {publication} for table other with (publish = 'delete')",
        "publishes other tables, and no inserts",
    ),
}


@pytest.mark.parametrize("kind", PUBLICATIONS)
def test_a_publication_that_is_not_ours_to_change(fresh: SlotRig, kind: str) -> None:
    create, word = PUBLICATIONS[kind]
    fresh.alter(create)
    publications = "select p.oid, p.xmin::text, p.pubname from pg_publication p"
    before = fresh.database.fetch(publications)
    fresh.refused("init-slot", 3, word, "--publication")
    assert fresh.database.fetch(publications) == before
    assert not fresh.slot_exists()


def test_other_tables_in_the_publication_stay_there_and_out_of_the_topic(fresh: SlotRig) -> None:
    fresh.alter("create table other (id int primary key)", "create publication {publication} for table other")
    assert "1 other table" in fresh.run("init-slot").stdout
    fresh.alter("insert into other values (1)", "update other set id = 2", "delete from other")
    rows = fresh.stage(count=2)
    fresh.catch_up()
    assert len(fresh.wait_for(rows)) == 2


def test_a_table_name_too_long_for_what_stands_beside_it(fresh: SlotRig) -> None:
    fresh.table = "o" * 60
    fresh.refused("init-slot", 3, "longer than 51 bytes")
    assert not fresh.slot_exists()


def test_a_missing_schema(fresh: SlotRig) -> None:
    fresh.table = "nowhere.outbox"
    fresh.refused("init-slot", 3, "nowhere", "does not exist")
    assert not fresh.slot_exists()
