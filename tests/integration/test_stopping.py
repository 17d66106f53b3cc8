"""How a relay ends when it is asked to: caught up, at a position, on a signal."""

import signal
import time

import pytest

from cdc_outbox.embedded import ServerProcess
from cdc_outbox.lsn import format_lsn
from tests.fix_command import Command
from tests.fix_kafka import Broker
from tests.fix_postgres import Database
from tests.relay_rig import (
    Death,
    Load,
    RelayRig,
    check_deaths,
    commit_lsn,
    metric,
    readiness,
    rows_of,
    standard_check,
)
from tests.waiting import eventually


def test_until_caught_up_ends_although_writers_go_on(rig: RelayRig) -> None:
    with Load(rig, seed=1) as load:
        eventually(lambda: len(load.committed) > 300)
        before = list(load.committed)
        rig.catch_up()
        during = rig.read()
        assert set(before) <= set(rows_of(during))
    rig.catch_up()
    assert standard_check(load.committed, load.rolled_back, rig.read()) == 0


def test_until_caught_up_ends_at_once_when_nothing_waits(rig: RelayRig) -> None:
    rig.catch_up()
    rig.database.execute("create table other as select generate_series(1, 1000)")
    rig.catch_up()
    assert rig.read() == []


def test_endpos_ends_between_two_transactions(rig: RelayRig) -> None:
    below = rig.stage(count=10)
    position = rig.wal_position
    above = rig.stage(count=10)
    done = rig.command.run("stream", *rig.stream_options, "--endpos", format_lsn(position))
    assert done.returncode == 0, done.stderr
    assert rows_of(rig.read()) == below
    assert rig.confirmed <= position
    rig.catch_up()
    assert rows_of(rig.read()) == below + above


def test_after_a_clean_stop_the_next_start_repeats_nothing(rig: RelayRig) -> None:
    """C48."""
    for _ in range(3):
        relay = rig.stream("-X", "linger.ms=3000")
        rows = rig.stage(count=20)
        eventually(lambda: metric(relay, "cdc_outbox_in_flight_rows"), 10, "rows linger")  # noqa: B023
        assert relay.terminate() == 0
        assert rig.wait_for(rows)
    rig.catch_up()
    assert len(rig.read()) == 60


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_in_the_middle_of_a_big_transaction_sends_it_whole(rig: RelayRig, signum: signal.Signals) -> None:
    rows = rig.stage(count=50_000)
    relay = rig.stream("-X", "queue.buffering.max.messages=1000")
    eventually(lambda: metric(relay, "cdc_outbox_in_flight_rows"), 10, "the transaction is being read")
    relay.signal(signum)
    assert relay.wait() == 0
    after = rig.stage()
    rig.catch_up()
    assert rows_of(rig.read()) == rows + after


@pytest.mark.kafka_only
def test_a_stop_ends_in_time_although_the_broker_is_frozen(
    private_broker: Broker, database: Database, command: Command
) -> None:
    """C48, C41."""
    rig = RelayRig(database, private_broker, command, private_broker.create_topic())
    rig.init()
    server = private_broker.server
    assert isinstance(server, ServerProcess)
    rows = rig.stage(count=10)
    deaths = []
    for shutdown_timeout, stop_at_once in (("1s", False), ("60s", True)):
        relay = rig.stream("--shutdown-timeout", shutdown_timeout)
        rig.wait_for(rows)
        rig.wait_until_confirmed(max(map(commit_lsn, rig.read())))
        ends = rig.ends()
        server.pause()
        rows += rig.stage(count=50)
        eventually(lambda: metric(relay, "cdc_outbox_in_flight_rows") == 50, 10, "the rows are in flight")  # noqa: B023
        relay.signal(signal.SIGTERM)
        started = time.monotonic()
        if stop_at_once:
            eventually(lambda: "draining" in readiness(relay)[1], 10, "it drains")  # noqa: B023
            relay.signal(signal.SIGTERM)
        assert relay.wait(4) == 0
        assert stop_at_once or time.monotonic() - started > 0.4
        deaths.append(Death(rig.confirmed, ends))
        server.resume()
    rig.catch_up()
    records = rig.read()
    standard_check(rows, [], records)
    check_deaths(deaths, records)
