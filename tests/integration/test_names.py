"""Names with capitals, spaces, quotes and SQL in them work in every command, and none is executed.

What can be no name is refused: test_bad_configuration.py."""

import json

import pytest

from cdc_outbox.statements import identifier
from tests.slot_rig import NewRole, SlotRig

SCHEMA = "Sch 'e'\"ma\"; --%s"
TABLE = "Out \"Box\"; drop table victim; -- 'x' %s {y} $1 \\ü"
ROLES = {
    "id": 'I d"; --',
    "task": "Ta'sk %s",
    "args": "Ar gs {x} $1",
    "key": "Ke\\y :\"x\" :'x'",
    "headers": 'select "headers"',
}


@pytest.fixture
def odd(fresh: SlotRig) -> SlotRig:
    """A table of which no name is plain, and one beside it that somebody could drop."""
    execute(fresh, "create table victim (i int)")
    execute(fresh, f"create schema {identifier(SCHEMA)}")
    kinds = {"id": "bigint generated always as identity primary key", "args": "jsonb", "headers": "jsonb"}
    fresh.table = f"{identifier(SCHEMA)}.{identifier(TABLE)}"
    columns = ", ".join(f"{identifier(name)} {kinds.get(role, 'text')}" for role, name in ROLES.items())
    execute(fresh, f"create table {fresh.table} ({columns})")
    fresh.publication += " Pub'\"; drop table victim; -- %s"
    return fresh


def execute(rig: SlotRig, statement: str) -> None:
    rig.database.connect().execute(statement.encode())


def count(rig: SlotRig, table: str) -> int:
    found = rig.database.connect().execute(f"select count(*) from {table}".encode()).fetchone()
    assert found
    return int(found[0])


def columns() -> list[str]:
    return [word for role, name in ROLES.items() for word in ("--column", f"{role}={name}")]


def test_every_command_takes_them(odd: SlotRig, new_role: NewRole) -> None:
    roles = {name: new_role(odd, prefix=f"{name} \"r\" 'x';--") for name in ("app", "relay")}

    def run(*command: str) -> str:
        done = odd.command.run(*command, *odd.names)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("init-slot", "--app-role", roles["app"], "--relay-role", roles["relay"])
    names = ", ".join(identifier(ROLES[role]) for role in ("task", "args", "key", "headers"))
    execute(odd, f"""insert into {odd.table} ({names}) values ('t''a"sk', '{{"n": 1}}', 'k', '{{"a": "b"}}')""")
    execute(odd, f"insert into {odd.table} ({names}) values ('big', to_jsonb(repeat('x', 1200000)), 'k', null)")
    header = ["--header", f'Ho"h={ROLES["task"]}']
    streamed = odd.run("stream", *columns(), *header, "--until-caught-up", "--on-poison", "dead-letter")
    assert streamed.returncode == 0, streamed.stderr
    (record,) = odd.read()
    assert (record.key, json.loads(record.value or b"")) == (b"k", {"n": 1})
    assert record.headers["a"] == b"b"
    assert record.headers["task"] == record.headers['Ho"h'] == b"t'a\"sk"
    assert "outbox" in run("status")
    run("doctor", *columns())
    assert "task=big" in run("dead-letters", "list")
    assert run("dead-letters", "retry", *columns(), "--task", "big'; drop table victim; --") == "0 rows staged again\n"
    assert run("dead-letters", "retry", *columns(), "--all") == "1 rows staged again\n"
    assert run("dead-letters", "discard", "--id", "1'); drop table victim; --") == "0 dead letters discarded\n"
    relay = odd.stream(*columns(), "--on-poison", "dead-letter")
    assert "2 rows purged" in run("purge", "--archive")
    assert relay.terminate() == 0
    assert "0 archived rows" in run("replay", *columns(), "--task", "'; drop table victim; --", "--dry-run")
    assert "1 rows staged again" in run("replay", *columns(), "--task", "t'a\"sk")
    assert count(odd, odd.table) == 1
    inbox = """public."In'b; ox -- {x}\""""
    run("init-inbox", "--inbox", inbox)
    assert run("inbox-trim", "--inbox", inbox, "--age", "1d") == "0 rows forgotten\n"
    assert "dropped" in run("drop-slot", "--yes")
    assert count(odd, "victim") == 0
