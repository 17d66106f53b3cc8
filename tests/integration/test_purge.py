"""A row is deleted only after Kafka acknowledged it (G4), and exactly the rows that were relayed are (G5)."""

import pytest

from cdc_outbox.embedded import ServerProcess
from tests.fix_command import Command
from tests.fix_kafka import Broker
from tests.fix_postgres import Database
from tests.relay_rig import RelayRig, metric, rows_of, standard_check
from tests.waiting import eventually

PURGING = ("--purge-every", "200ms")


def test_relayed_rows_are_purged_the_last_ones_too(rig: RelayRig) -> None:
    relay = rig.stream(*PURGING)
    rows = rig.stage(count=700) + rig.stage("other", 1)
    eventually(lambda: rig.backlog == 0, 20, "the table is empty")
    eventually(lambda: metric(relay, "cdc_outbox_purged_rows_total") == 701, 5, "the purge was counted")
    assert relay.terminate() == 0
    assert rows_of(rig.read()) == rows


def test_rows_of_a_relay_that_is_gone_are_purged_by_a_purge_run_apart(rig: RelayRig) -> None:
    rig.stage(count=10)
    rig.catch_up()
    unsent = rig.stage(count=3)
    relay = rig.stream()
    rig.wait_for(unsent)
    assert "13 rows would be purged" in rig.purge("--dry-run")
    assert rig.backlog == 13
    assert "13 rows purged" in rig.purge("--purge-batch", 5)
    assert rig.backlog == 0
    assert relay.running


def test_without_a_relay_nothing_that_waits_is_purged(rig: RelayRig) -> None:
    rig.stage(count=10)
    assert "0 rows purged; the slot is not there yet" in rig.purge()
    assert rig.backlog == 10


def test_locked_rows_are_skipped_and_purged_later(rig: RelayRig) -> None:
    """C54."""
    holder = rig.database.connect(autocommit=False)
    rig.stage(count=20)
    holder.execute("select from outbox where id <= 7 for update")
    relay = rig.stream(*PURGING)
    eventually(lambda: rig.backlog == 7, 20, "all rows but the locked ones are purged")
    assert rig.database.fetch_value("select max(id) from outbox") == 7
    holder.rollback()
    eventually(lambda: rig.backlog == 0, 20, "the others are purged too")
    assert relay.terminate() == 0
    assert "purge:" not in relay.stderr_text()


@pytest.mark.kafka_only
def test_nothing_is_purged_that_a_frozen_broker_has_not_acknowledged(
    private_broker: Broker, database: Database, command: Command
) -> None:
    """The low id that commits late is visible, below ids that were relayed and purged, and has not been relayed.
    A locked row keeps the purge awake all the while."""
    rig = RelayRig(database, private_broker, command, private_broker.create_topic())
    rig.init()
    relay = rig.stream(*PURGING)
    late_writer = database.connect(autocommit=False)
    late = rig.stage("late", on=late_writer)
    holder = database.connect(autocommit=False)
    rows = rig.stage(count=499)
    holder.execute("select from outbox where id = (select max(id) from outbox) for update")
    assert rows_of(rig.wait_for(rows)) == rows
    eventually(lambda: rig.backlog == 1, 20, "all others are purged")

    server = private_broker.server
    assert isinstance(server, ServerProcess)
    server.pause()
    late_writer.commit()
    more = rig.stage(count=50)
    eventually(lambda: metric(relay, "cdc_outbox_in_flight_rows") == 51, 10, "the rows are in flight")
    position = rig.confirmed
    assert "0 rows purged; the slot is not there yet" in rig.purge()
    assert rig.backlog == 52
    assert rig.confirmed == position
    assert relay.running

    server.resume()
    holder.rollback()
    eventually(lambda: rig.backlog == 0, 60, "the rows are relayed and purged")
    records = rig.read()
    assert standard_check([*rows, *late, *more], [], records) == 0
    assert rows_of(records) == rows + late + more
