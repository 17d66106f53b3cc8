"""What `init-slot --app-role --relay-role` grants is all that these roles have: the catalogue says so, and Postgres."""

import psycopg
import pytest

from cdc_outbox.statements import identifier
from tests.slot_rig import NewRole, SlotRig, refusal
from tests.waiting import eventually

GRANTS = """
with role as (select oid from pg_roles where rolname = %(role)s)
select relname::text, null, privilege_type
from pg_class, aclexplode(relacl) where grantee = (select oid from role)
union
select relname::text, attname::text, privilege_type
from pg_attribute join pg_class c on c.oid = attrelid, aclexplode(attacl) where grantee = (select oid from role)
union
select nspname::text, 'schema', privilege_type
from pg_namespace, aclexplode(nspacl) where grantee = (select oid from role)
union
select proname::text, 'function', privilege_type
from pg_proc, aclexplode(proacl) where grantee = (select oid from role)"""

APP = {
    ("public", "schema", "USAGE"),
    ("outbox", None, "INSERT"),
    ("outbox", "id", "SELECT"),  # for `returning id`
}
RELAY = {
    ("public", "schema", "USAGE"),
    ("outbox", None, "SELECT"),
    ("outbox", None, "DELETE"),
    ("outbox", "id", "UPDATE"),  # Postgres asks for it where a delete skips locked rows
    ("outbox_checkpoint", None, "SELECT"),
    ("outbox_checkpoint", None, "UPDATE"),
    *(("outbox_dead_letter", None, privilege) for privilege in ("SELECT", "INSERT", "DELETE")),
    *(("outbox_archive", None, privilege) for privilege in ("SELECT", "INSERT", "DELETE")),
}

# Whoever has no business with it.
WRONG_FOR_BOTH = [
    "update outbox set task = 'x'",
    "update outbox set args = '{}', headers = null",
    "truncate outbox",
    "drop table outbox",
    "drop table outbox_checkpoint cascade",
    "alter table outbox add column x int",
    "alter table outbox disable trigger all",
    "create index on outbox (task)",
    "create trigger t before insert on outbox execute function suppress_redundant_updates_trigger()",
    "create table public.mine (i int)",
    "create schema mine",
    "create publication mine for table outbox",
    "alter publication PUBLICATION set (publish = 'insert, delete')",
    "drop publication PUBLICATION",
    "insert into outbox_checkpoint select * from outbox_checkpoint",
    "delete from outbox_checkpoint",
    "truncate outbox_archive",
    "update outbox_archive set task = 'x'",
    "update outbox_dead_letter set task = 'x'",
    "select * from secret",
    "copy secret to stdout",
    "copy (select 1) to program 'true'",
    "copy outbox from '/etc/passwd'",
    "select pg_read_file('/etc/passwd')",
    "select rolpassword from pg_authid",
    "create role mine",
    "alter role postgres nologin",
    "set role postgres",
    "alter system set wal_level = replica",
    "set session_replication_role = replica",
    "select lo_export(1, '/tmp/x')",
]
WRONG_FOR_APP = [
    "select * from outbox",
    "select task from outbox",
    "copy outbox to stdout",
    "delete from outbox",
    "select * from outbox for update",
    "insert into outbox (task) values ('x') returning task",
    "insert into outbox (task) values ('x') on conflict (id) do update set task = 'y'",
    "select * from outbox_checkpoint",
    "update outbox_checkpoint set position = '0/0'",
    "select * from outbox_dead_letter",
    "insert into outbox_dead_letter (row, error) values ('{}', '')",
    "select * from outbox_archive",
    "insert into outbox_archive (task) values ('x')",
    "select pg_drop_replication_slot('SLOT')",
    "select pg_replication_slot_advance('SLOT', '0/1')",
    "select pg_create_logical_replication_slot('mine', 'pgoutput')",
]
WRONG_FOR_RELAY = [
    "insert into outbox (task) values ('x')",
    "insert into outbox (task) select task from outbox_archive",
]


@pytest.fixture
def roles(fresh: SlotRig, new_role: NewRole) -> tuple[str, str]:
    app, relay = new_role(fresh, prefix="App 'a'"), new_role(fresh, "login replication", prefix='Relay "r"; --')
    fresh.alter("create table secret (s text)")
    fresh.init("--app-role", app, "--relay-role", relay)
    return app, relay


def test_no_more_is_granted_than_is_needed(fresh: SlotRig, roles: tuple[str, str]) -> None:
    for role, expected in zip(roles, (APP, RELAY), strict=True):
        assert set(fresh.database.fetch(GRANTS, {"role": role})) == expected
        owned = "select count(*) from pg_class where relowner = (select oid from pg_roles where rolname = %s)"
        assert fresh.database.fetch_value(owned, (role,)) == 0


def test_everything_else_is_denied(fresh: SlotRig, roles: tuple[str, str]) -> None:
    fresh.stage()
    before = fresh.state()
    for role, wrong in zip(roles, (WRONG_FOR_APP, WRONG_FOR_RELAY), strict=True):
        conninfo = fresh.database.server.socket_dsn(fresh.database.name, user=role)
        with psycopg.connect(conninfo, autocommit=True) as connection:
            for statement in (*WRONG_FOR_BOTH, *wrong):
                query = statement.replace("PUBLICATION", identifier(fresh.publication)).replace("SLOT", fresh.slot)
                try:
                    connection.execute(query.encode())
                except psycopg.errors.InsufficientPrivilege:
                    continue
                except psycopg.Error as error:
                    pytest.fail(f"{role}: {statement}: {error}")
                pytest.fail(f"{role} may {statement}")
    assert fresh.state() == before


def test_each_can_do_its_work(fresh: SlotRig, roles: tuple[str, str]) -> None:
    app, relay_role = roles
    with psycopg.connect(
        fresh.database.server.socket_dsn(fresh.database.name, user=app), autocommit=True
    ) as connection:
        insert = "insert into outbox (task, args, key, headers) values ('job', '{\"n\": 1}', 'k', '{\"a\": \"b\"}')"
        assert connection.execute(f"{insert} returning id".encode()).fetchone() == (1,)
        connection.execute(b"insert into outbox (task, args) values ('large', to_jsonb(repeat('x', 1200000)))")
    fresh.user = relay_role
    relay = fresh.stream(
        *("--purge-every", "100ms", "--archive", "--archive-retain", "1h"),
        *("--on-poison", "dead-letter", "--check-every", "200ms"),
    )
    fresh.wait_for([("job", 1)])
    eventually(lambda: fresh.backlog == 0, 30, "the rows are purged")
    for command, words in (
        (["status"], "active, held by"),
        (["purge"], "0 rows purged"),
        (["dead-letters", "list"], "task=large"),
        (["dead-letters", "discard", "--all"], "1 dead letters discarded"),
        (["replay", "--task", "job", "--dry-run"], "1 archived rows"),
        (["doctor"], "ok    "),
    ):
        done = fresh.command.run(*command, *fresh.names)
        assert done.returncode == 0, done.stdout + done.stderr
        assert words in done.stdout
    refusal(fresh.command.run("replay", "--task", "job", *fresh.names), 3, "permission denied", "hint: ")
    assert relay.terminate() == 0


def test_who_may_not_grant_is_told_so(fresh: SlotRig, roles: tuple[str, str], new_role: NewRole) -> None:
    """Postgres itself only warns where somebody has a privilege and may not pass it on."""
    other = new_role(fresh, prefix="other")
    fresh.user = roles[1]
    for option in ("--app-role", "--relay-role"):
        refusal(fresh.run("init-slot", option, other), 3, f"granting to {other}", "owner")
    assert fresh.database.fetch(GRANTS, {"role": other}) == []


def test_a_role_that_is_not_there_is_named(fresh: SlotRig) -> None:
    for option in ("--app-role", "--relay-role"):
        name = 'no "body"; drop table users'
        refusal(fresh.run("init-slot", option, name), 3, f"role {identifier(name)[1:-1]!r}"[:10].replace("'", '"'))
