"""Kafka frozen, slow, full, or without the topic: what it does not have is not confirmed, and all of it arrives.

The broker is frozen behind a proxy, so that the topic can be read meanwhile.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cdc_outbox.lsn import format_lsn
from tests.fix_command import Running
from tests.fix_kafka import Broker, Record
from tests.fix_proxy import Proxy, StartProxy
from tests.relay_rig import Death, Load, RelayRig, Row, check_deaths, commit_lsn, metric, rows_of, standard_check
from tests.waiting import eventually

pytestmark = pytest.mark.kafka_only

WALSENDER_TIMEOUT = "terminating walsender process due to replication timeout"


@pytest.fixture
def link(rig: RelayRig, proxy: StartProxy) -> Proxy:
    kafka = rig.broker.kafka
    return proxy(kafka.proxied_port, listen_port=kafka.proxy_port)


def start(rig: RelayRig, *options: object) -> Running:
    """A relay that reaches the broker through the link."""
    return rig.stream("--bootstrap-servers", rig.broker.kafka.proxied_bootstrap, *options)


def in_flight(relay: Running, rows: float) -> None:
    eventually(lambda: metric(relay, "cdc_outbox_in_flight_rows") >= rows, 20, f"{rows} rows are in flight")


def replies(rig: RelayRig, count: int) -> None:
    """Returns once the walsender has had that many more status updates, none of which confirmed anything."""
    query = """select reply_time, flush_lsn from pg_stat_replication join pg_replication_slots on active_pid = pid
               where slot_name = %s"""
    found = set()
    confirmed = rig.confirmed

    def enough() -> bool:
        ((time, flushed),) = rig.database.fetch(query, (rig.slot,))
        found.add((time, flushed))
        return len(found) > count

    eventually(enough, 60, f"{count} status updates")
    assert len({flushed for _, flushed in found}) == 1
    assert rig.confirmed == confirmed


@contextmanager
def no_walsender_timeout(rig: RelayRig, setting: str) -> Iterator[None]:
    """For new connections to this database; none may reach it."""
    rig.database.execute(f"alter database {rig.database.name} set wal_sender_timeout = '{setting}'")
    log: Path = rig.database.server.log
    before = log.read_text().count(WALSENDER_TIMEOUT)
    yield
    assert log.read_text().count(WALSENDER_TIMEOUT) == before


def in_first_order(rows: list[Row], records: list[Record]) -> None:
    """Nothing is missing, and the first occurrences are in order. What a producer had sent to a broker that hung may
    arrive in the middle of its successor's repeats: a repeat too, and so allowed."""
    first = list(dict.fromkeys(rows_of(records)))
    assert first == rows


# -- frozen ---------------------------------------------------------------------------------------------------------


def test_no_keepalive_is_confirmed_while_rows_wait_for_a_frozen_broker(rig: RelayRig, link: Proxy) -> None:
    """C02 (agoodway/walex#64, Trendyol/go-pq-cdc#107, readysettech/readyset#471): WAL of others moves the server's
    keepalives past rows that Kafka has not acknowledged."""
    with no_walsender_timeout(rig, "2s"):
        relay = start(rig)
        rows = rig.stage(count=3)
        rig.wait_until_confirmed(commit_lsn(rig.wait_for(rows)[-1]))
        link.stall()
        ends = rig.ends()
        rows += rig.stage(count=50)
        in_flight(relay, 50)
        for _ in range(4):
            rig.database.execute("create table w as select repeat('w', 1000) from generate_series(1, 5000)")
            rig.database.execute("drop table w")
            replies(rig, 1)
        position = format_lsn(rig.wal_position)
        sent = """select sent_lsn >= %s::pg_lsn from pg_stat_replication join pg_replication_slots on active_pid = pid
                  where slot_name = %s"""
        rig.database.execute("select txid_current()")
        eventually(lambda: rig.database.fetch_value(sent, (position, rig.slot)), 20, "the server is past it")
        replies(rig, 3)
    relay.kill9()
    link.cut()
    death = Death(rig.death().confirmed_flush_lsn, ends)
    link.resume()
    rig.catch_up()
    records = rig.read()
    assert standard_check(rows, [], records) == 0
    check_deaths([death], records)


def test_a_delivery_that_timed_out_is_sent_again_and_nothing_is_confirmed_meanwhile(rig: RelayRig, link: Proxy) -> None:
    """C05 (lukashes/outboxx#110, confluentinc/confluent-kafka-python#104): an operator's message.timeout.ms makes
    librdkafka drop what waits; a flush then "succeeds"."""
    relay = start(rig, "-X", "message.timeout.ms=1500")
    rows = rig.stage(count=3)
    rig.wait_until_confirmed(commit_lsn(rig.wait_for(rows)[-1]))
    confirmed = rig.confirmed
    link.stall()
    rows += rig.stage(count=100)
    relay.wait_for_log("starting over", 30)
    rows += rig.stage(count=10)

    def started_over_twice() -> bool:
        return relay.stderr_text().count("starting over") >= 2

    eventually(started_over_twice, 40, "it tries again")
    assert metric(relay, "cdc_outbox_delivery_failures_total") >= 100
    assert rig.confirmed == confirmed
    assert rig.backlog == len(rows)
    link.resume()
    rig.wait_for(rows)
    assert relay.terminate() == 0
    rig.catch_up()
    in_first_order(rows, rig.read())


def test_a_frozen_broker_and_a_full_queue_cost_no_walsender(rig: RelayRig, link: Proxy) -> None:
    """C06a (2ndQuadrant/bdr#233, MaterializeInc/materialize#6835, Autodesk/pgbelt#266): the queue is full, the socket
    from Postgres too, and for three timeouts status updates go on."""
    with no_walsender_timeout(rig, "2s"):
        relay = start(rig, "-X", "queue.buffering.max.messages=100")
        link.stall()
        rows = []
        for _ in range(20):
            rows += rig.stage(count=500, padding=1000)
        in_flight(relay, 100)
        replies(rig, 12)
        link.resume()
        rig.wait_for(rows[-1:])
        assert relay.terminate() == 0
    assert "starting over" not in relay.stderr_text()
    assert standard_check(rows, [], rig.read()) == 0


@pytest.mark.slow
def test_one_transaction_on_its_way_to_a_slow_broker_goes_through_in_one_pass(rig: RelayRig, link: Proxy) -> None:
    """C06b (MaterializeInc/materialize#26813, epgsql/epgsql#275): it takes several timeouts."""
    with no_walsender_timeout(rig, "1s"):
        # Uncompressed, or the padding shrinks to nothing and the link is not slow at all.
        relay = start(rig, "-X", "queue.buffering.max.messages=500", "-X", "compression.codec=none")
        link.slow(bytes_per_second=400_000)
        rows = rig.stage(count=20_000, padding=150)
        replies(rig, 8)
        assert sum(rig.ends().values()) < len(rows)
        link.slow()
        rig.wait_for(rows[-1:])
        assert relay.terminate() == 0
    assert "starting over" not in relay.stderr_text()
    assert standard_check(rows, [], rig.read()) == 0


# -- full -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "count", "padding"),
    [("queue.buffering.max.messages=100", 20_000, 0), ("queue.buffering.max.kbytes=1000", 60, 200_000)],
)
def test_a_full_queue_holds_rows_back_and_loses_none(
    rig: RelayRig, link: Proxy, limit: str, count: int, padding: int
) -> None:
    """C45 (confluentinc/confluent-kafka-python#16 and #341, confluentinc/librdkafka#117): BufferError again and again,
    while the broker freezes and thaws."""
    with no_walsender_timeout(rig, "2s"):
        relay = start(rig, "-X", limit)
        rows = []
        for _ in range(4):
            rows += rig.stage(count=count // 4, padding=padding)
        stalls = 0
        while (end := sum(rig.ends().values())) < len(rows):
            link.stall()
            stalls += 1
            in_flight(relay, 1)
            link.resume()
            eventually(lambda: sum(rig.ends().values()) > end, 20, "more arrives")
            if stalls == 15:  # enough of it
                eventually(lambda: sum(rig.ends().values()) >= len(rows), 40, "the rest arrives")
        assert relay.terminate() == 0
    assert "starting over" not in relay.stderr_text()
    assert standard_check(rows, [], rig.read()) == 0


def test_a_record_larger_than_the_whole_queue_is_named_and_not_waited_for(rig: RelayRig) -> None:
    """C45, the kind of it: librdkafka calls an empty queue full for a record that it could never hold."""
    options = ("-X", "queue.buffering.max.kbytes=100")
    before = rig.stage(count=5)
    rig.stage(padding=200_000)
    after = rig.stage(count=5)
    halted = rig.command.run("stream", *rig.stream_options, *options)
    assert halted.returncode == 5
    assert re.search(r"error: .*row id=6 .*queue\.buffering\.max\.kbytes", halted.stderr)
    rig.catch_up(*options, "--on-poison", "dead-letter")
    assert set(rows_of(rig.read())) == {*before, *after}
    assert rig.database.fetch_value("select row_id from outbox_dead_letter") == "6"


# -- the topic ------------------------------------------------------------------------------------------------------


def test_a_topic_re_created_under_load_with_more_partitions_gets_all_that_its_namesake_did_not(rig: RelayRig) -> None:
    """C43 (confluentinc/librdkafka#4966 and #4898, twmb/franz-go#377)."""
    relay = rig.stream()
    with Load(rig, seed=43) as load:
        eventually(lambda: sum(rig.ends().values()) > 100, 20, "rows arrive")
        rig.broker.delete_topic(rig.topic)
        relay.wait_for_log("starting over", 40)
        begun = len(load.committed)
        eventually(lambda: len(load.committed) > begun + 100, 20, "rows are written meanwhile")
        rig.broker.create_topic(rig.topic, partitions=3)
        eventually(lambda: sum(rig.ends().values()) > 100, 40, "rows arrive again")
        again = len(load.committed)
        eventually(lambda: len(load.committed) > again + 50, 20, "and more rows")
    assert relay.terminate() == 0
    rig.catch_up()
    records = rig.read()
    received = set(rows_of(records))
    assert set(load.committed[begun:]) <= received
    assert received <= set(load.committed)
    standard_check([row for row in load.committed if row in received], load.rolled_back, records)


def test_a_topic_swapped_for_a_namesake_at_once_is_noticed_by_nobody_and_loses_no_new_row(
    rig: RelayRig, broker: Broker
) -> None:
    """C43: deleted and made again between two rows, with fewer partitions than before and then with more."""
    relay = rig.stream()
    for partitions in (4, 1, 3):
        rig.wait_for(rig.stage(count=3))
        rig.wait_until_confirmed(rig.confirmed)
        broker.delete_topic(rig.topic)
        eventually(lambda: rig.topic not in broker.admin.list_topics(timeout=5).topics, 20, "it is gone")
        broker.create_topic(rig.topic, partitions=partitions)
        rows = [row for task in ("mail", "other", "third") for row in rig.stage(task, 5)]
        rig.wait_for(rows, 40)
    assert relay.terminate() == 0
