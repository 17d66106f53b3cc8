"""The worker's table from the command line, and the application's role."""

import psycopg

from cdc_outbox import Inbox, stage
from tests.fix_command import Command
from tests.fix_postgres import Database


def test_init_inbox_makes_the_table_once_and_inbox_trim_forgets_what_is_old(
    database: Database, command: Command
) -> None:
    for said in ("created", "was there"):
        done = command.run("init-inbox", "--dsn", database.dsn, "--inbox", '"My Inbox"')
        assert (done.returncode, done.stdout) == (0, f'inbox: "public"."My Inbox" {said}\n')
    inbox = Inbox(table='"My Inbox"')
    with psycopg.connect(database.dsn) as connection:
        assert inbox.once(connection, "1")
        assert inbox.once(connection, "2")
        connection.execute("""update "My Inbox" set done_at = now() - interval '8 days' where id = '1'""")
    done = command.run("inbox-trim", "--dsn", database.dsn, "--inbox", '"My Inbox"', "--age", "7d")
    assert (done.returncode, done.stdout) == (0, "1 rows forgotten\n")
    assert database.fetch('select id from "My Inbox"') == [("2",)]


def test_inbox_trim_on_a_table_that_is_not_there_is_one_line(database: Database, command: Command) -> None:
    done = command.run("inbox-trim", "--dsn", database.dsn, "--age", "7d")
    assert done.returncode == 3
    assert done.stderr.startswith("error: trimming the inbox:")
    assert len(done.stderr.splitlines()) == 1


def test_the_applications_role_can_stage_and_is_told_the_id(database: Database, command: Command) -> None:
    role = f"app_{database.name}"
    database.execute(f"create role {role} login")
    try:
        options = ("--dsn", database.dsn, "--slot", database.name, "--publication", database.name)
        assert command.run("init-slot", *options, "--app-role", role).returncode == 0
        with database.connect(autocommit=False, user=role) as connection:
            assert stage(connection, "hello", {}) == 1
    finally:
        database.execute(f"drop owned by {role}; drop role {role}")
