"""The transaction is the gate (G1, G2, G8): nothing before the commit is visible, nothing after a rollback."""

import threading
from collections.abc import Callable

import psycopg
import pytest

from cdc_outbox.embedded import PostgresServer
from tests.fix_command import Command
from tests.fix_kafka import Broker, CreateTopic
from tests.fix_postgres import Database, StartPostgres
from tests.relay_rig import RelayRig, metric, rows_of, standard_check
from tests.waiting import eventually


def test_an_open_transaction_sends_nothing_until_it_commits(rig: RelayRig) -> None:
    rig.stream()
    writer = rig.database.connect(autocommit=False)
    late = rig.stage(count=3, on=writer)
    # What commits later arrives, so the relay has read past the open rows.
    others = rig.stage("other", 3)
    assert rows_of(rig.wait_for(others)) == others
    writer.commit()
    assert rows_of(rig.wait_for(late)) == others + late


def test_a_rollback_takes_its_rows_with_it(rig: RelayRig) -> None:
    rig.stream()
    writer = rig.database.connect(autocommit=False)
    undone = rig.stage(count=5, on=writer)
    writer.rollback()
    kept = rig.stage()
    standard_check(kept, undone, rig.wait_for(kept))


def test_a_rollback_to_a_savepoint_takes_only_what_came_after_it(rig: RelayRig) -> None:
    rig.stream()
    writer = rig.database.connect(autocommit=False)
    kept = rig.stage(count=500, on=writer)
    with writer.transaction() as savepoint:
        undone = rig.stage(count=500, on=writer)
        with writer.transaction():  # released, and undone with the one around it
            undone += rig.stage(count=5, on=writer)
        raise psycopg.Rollback(savepoint)
    kept += rig.stage(count=5, on=writer)
    writer.commit()
    records = rig.wait_for(kept)
    assert standard_check(kept, undone, records) == 0
    assert len({record.headers["commit_lsn"] for record in records}) == 1


def test_prepared_transactions_are_relayed_when_they_are_committed(rig: RelayRig) -> None:
    rig.stream()
    first, second = (f"{rig.slot} {end}" for end in ("committed", "rolled back"))
    rows = []
    for name in (first, second):
        writer = rig.database.connect(autocommit=False)
        rows.append(rig.stage(count=3, on=writer))
        writer.execute(f"prepare transaction '{name}'".encode())
    committed, rolled_back = rows
    between = rig.stage("other")
    assert rows_of(rig.wait_for(between)) == between
    rig.database.execute(f"rollback prepared '{second}'")
    rig.database.execute(f"commit prepared '{first}'")
    after = rig.stage("other")
    records = rig.wait_for([*committed, *after])
    standard_check([*committed, *between, *after], rolled_back, records)
    assert rows_of(records) == between + committed + after


def test_a_row_inserted_and_deleted_in_one_transaction_is_relayed(rig: RelayRig) -> None:
    rig.stream()
    writer = rig.database.connect(autocommit=False)
    rows = []
    for _ in range(100):
        rows += rig.stage(on=writer)
        writer.execute("delete from outbox")
        writer.commit()
    assert rows_of(rig.wait_for(rows)) == rows


@pytest.fixture
def synchronous_rig(
    postgres_server: StartPostgres,
    new_database: Callable[[PostgresServer], Database],
    broker: Broker,
    command: Command,
    topic: CreateTopic,
) -> RelayRig:
    """Set up first, then made to wait for a standby that does not exist."""
    database = new_database(postgres_server())
    rig = RelayRig(database, broker, command, topic())
    rig.init()
    set_synchronous_standby(database, "ghost")
    return rig


def set_synchronous_standby(database: Database, name: str) -> None:
    with database.connect(options="-c synchronous_commit=local") as connection:
        connection.execute(f"alter system set synchronous_standby_names = '{name}'".encode())
        connection.execute("select pg_reload_conf()")
    current = "select current_setting('synchronous_standby_names')"
    eventually(lambda: database.fetch_value(current) == name, 10, "the server has read its settings")


def test_a_row_that_others_cannot_see_yet_does_not_reach_the_topic(synchronous_rig: RelayRig) -> None:
    rig = synchronous_rig
    relay = rig.stream()
    staged: list[list[tuple[str, int]]] = []
    writer = threading.Thread(target=lambda: staged.append(rig.stage(count=3)))
    writer.start()
    waiting = "select count(*) from pg_stat_activity where wait_event = 'SyncRep'"
    eventually(lambda: rig.database.fetch_value(waiting) == 1, 10, "the commit waits for the standby")

    def waited() -> float:
        return metric(relay, "cdc_outbox_visibility_wait_seconds_total")

    # The relay has read the row, and asks again and again whether others see it.
    since = eventually(waited, 10, "the relay asks for the row")
    eventually(lambda: waited() > since, 10, "the relay asks again")
    assert rig.backlog == 0
    assert rig.read() == []
    assert writer.is_alive()

    set_synchronous_standby(rig.database, "")
    writer.join(10)
    assert rows_of(rig.wait_for(staged[0])) == staged[0]
    assert rig.backlog == 3


def test_a_stop_while_a_commit_is_not_visible_leaves_it_for_the_next_start(synchronous_rig: RelayRig) -> None:
    rig = synchronous_rig
    relay = rig.stream("--shutdown-timeout", "10s")
    staged: list[list[tuple[str, int]]] = []
    writer = threading.Thread(target=lambda: staged.append(rig.stage()))
    writer.start()
    eventually(lambda: metric(relay, "cdc_outbox_visibility_wait_seconds_total"), 10, "the relay asks for the row")
    assert relay.terminate(5) == 0
    assert rig.read() == []
    set_synchronous_standby(rig.database, "")
    writer.join(10)
    rig.catch_up()
    assert rows_of(rig.read()) == staged[0]
