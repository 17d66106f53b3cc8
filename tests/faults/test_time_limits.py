"""The limits that docs/runbook.md states, each measured. It names the test that holds each; this is most of them."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from tests.fix_command import Command, Running
from tests.fix_kafka import Broker
from tests.fix_postgres import Database
from tests.fix_proxy import Proxy, StartProxy
from tests.kafka_server import KafkaServer
from tests.relay_rig import RelayRig, Row, commit_lsn, metric, rows_of, standard_check
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
RESUMES_WITHIN = 10.0
SHUTDOWN_TIMEOUT = 3.0
MOST_IN_FLIGHT = 5
"""Batches that an idempotent producer sends before it waits for an acknowledgement (Kafka)."""
SLACK = 6.0
"""For a machine that has other things to do; the relay says itself how long it waited."""


@pytest.fixture
def private(private_broker: Broker, database: Database, command: Command) -> RelayRig:
    """With a broker of the test's own."""
    rig = RelayRig(database, private_broker, command, private_broker.create_topic())
    rig.init()
    return rig


@pytest.fixture
def link(private: RelayRig, proxy: StartProxy) -> Proxy:
    kafka = private.broker.kafka
    return proxy(kafka.proxied_port, listen_port=kafka.proxy_port)


# -- Postgres -------------------------------------------------------------------------------------------------------


def test_a_server_process_that_answers_no_question_is_noticed_within_two_status_intervals(rig: RelayRig) -> None:
    """The stream goes on, the connection beside it is half-open: no transaction can be let through."""
    rig.database.execute(f"alter database {rig.database.name} set wal_sender_timeout = '4s'")
    relay = rig.stream()
    rows = rig.stage(count=3)
    rig.wait_until_confirmed(commit_lsn(rig.wait_for(rows)[-1]))
    pid = rig.database.fetch_value(
        "select pid from pg_stat_activity where application_name = 'cdc-outbox' and backend_type = 'client backend'"
        " and datname = current_database() and query ^@ 'update'"
    )
    os.kill(pid, signal.SIGSTOP)
    try:
        rows += rig.stage(count=3)
        staged = time.monotonic()
        relay.wait_for_log("starting over", 40)
        assert time.monotonic() - staged < 2 * 1.0 + SLACK
        assert "asking for a snapshot: no answer within 2 s" in relay.stderr_text()
        rig.wait_for(rows, RESUMES_WITHIN)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert relay.terminate() == 0
    standard_check(rows, [], rig.read())


# -- Kafka ----------------------------------------------------------------------------------------------------------


@pytest.mark.kafka_only
@pytest.mark.slow  # it starts a broker three times
def test_streaming_resumes_when_the_broker_is_back_from_a_crash_a_restart_or_a_freeze(private: RelayRig) -> None:
    kafka = private.broker.kafka
    relay = private.stream()
    rows = private.stage(count=3)
    private.wait_for(rows)

    def resumes(back: Callable[[], object]) -> float:
        nonlocal rows
        rows += private.stage(count=100)
        # One more if the broker was gone before the last acknowledgement was.
        eventually(lambda: metric(relay, "cdc_outbox_in_flight_rows") >= 100, 20, "rows wait for it")
        back()
        since = time.monotonic()
        rows += private.stage(count=1)
        private.wait_for(rows, 60)
        return time.monotonic() - since

    kafka.kill9()
    took = [resumes(kafka.start)]
    kafka.stop()
    took.append(resumes(kafka.start))
    kafka.pause()
    took.append(resumes(kafka.resume))
    print(f"resumed within {', '.join(f'{seconds:.1f}' for seconds in took)} s")
    assert max(took) < RESUMES_WITHIN
    assert relay.terminate() == 0
    standard_check(rows, [], private.read())


@pytest.mark.kafka_only
@pytest.mark.slow  # until librdkafka's pauses between attempts are at their longest
def test_streaming_resumes_when_the_network_to_the_broker_is_back(rig: RelayRig, proxy: StartProxy) -> None:
    kafka = rig.broker.kafka
    link = proxy(kafka.proxied_port, listen_port=kafka.proxy_port)
    relay = rig.stream("--bootstrap-servers", kafka.proxied_bootstrap)
    rows = rig.stage(count=3)
    rig.wait_for(rows)
    link.refuse()
    away = time.monotonic()
    rows += rig.stage(count=100)
    eventually(lambda: time.monotonic() - away > 20, 30, "it is away for 20 s")
    link.accept()
    since = time.monotonic()
    rig.wait_for(rows, 60)
    assert time.monotonic() - since < RESUMES_WITHIN
    assert relay.terminate() == 0
    standard_check(rows, [], rig.read())


@pytest.mark.kafka_only
@pytest.mark.slow  # it starts a broker twice
def test_after_a_fatal_error_of_idempotence_a_new_producer_sends_again_from_the_slot(
    private: RelayRig, link: Proxy
) -> None:
    """In the middle of a transaction the broker dies, and comes back without batches that it had acknowledged, as after
    an unclean election. What follows is out of sequence, and librdkafka will not go on."""
    kafka = private.broker.kafka
    relay = private.stream(
        *("--bootstrap-servers", kafka.proxied_bootstrap),
        *("-X", "compression.codec=none", "-X", "batch.size=20000"),
    )
    rows = private.stage(count=3)
    private.wait_for(rows)
    link.slow(bytes_per_second=400_000)
    rows += private.stage(count=4000, padding=500)
    eventually(lambda: sum(private.ends().values()) > 1000, 30, "a part of the transaction has arrived")
    kafka.kill9()
    link.slow()
    assert forget_batches(kafka, private.topic) > 2 * MOST_IN_FLIGHT
    kafka.start()
    since = time.monotonic()
    private.wait_for(rows, 60)
    assert time.monotonic() - since < RESUMES_WITHIN
    assert "(OUT_OF_ORDER_SEQUENCE_NUMBER); starting over from the slot" in relay.stderr_text()
    assert relay.terminate() == 0
    standard_check(rows, [], private.read())


def forget_batches(kafka: KafkaServer, topic: str) -> int:
    """Cuts the second half of the record batches off the topic's only segment; how many.

    Batches follow each other, each an offset of 8 bytes, a length of 4, and that many bytes (Kafka's documentation,
    "Record Batch").
    """
    (segment,) = (kafka.directory / "data" / f"{topic}-0").glob("*.log")
    content = segment.read_bytes()
    starts = []
    at = 0
    while at + 12 <= len(content) and (length := int.from_bytes(content[at + 8 : at + 12])):
        starts.append(at)
        at += 12 + length
    with segment.open("r+b") as file:
        file.truncate(starts[len(starts) // 2])
    return len(starts) - len(starts) // 2


# -- stopping -------------------------------------------------------------------------------------------------------


def stop_in_time(relay: Running) -> None:
    asked = time.monotonic()
    assert relay.terminate(SHUTDOWN_TIMEOUT + 20) == 0
    took = time.monotonic() - asked
    print(f"SIGTERM: ended after {took:.2f} s")
    assert took < SHUTDOWN_TIMEOUT + 0.5


@pytest.mark.kafka_only
@pytest.mark.parametrize("frozen", ["Kafka", "Postgres", "Kafka and Postgres"])
def test_a_stop_ends_within_the_shutdown_timeout_whoever_is_frozen(
    rig: RelayRig, proxy: StartProxy, frozen: str
) -> None:
    """C48 and its kind: rows are in flight, a purge is under way, and somebody does not answer."""
    kafka = rig.broker.kafka
    to_kafka = proxy(kafka.proxied_port, listen_port=kafka.proxy_port)
    to_postgres = proxy(rig.database.server.port)
    relay = rig.stream(
        *("--dsn", make_conninfo(rig.database.dsn, port=to_postgres.port)),
        *("--bootstrap-servers", kafka.proxied_bootstrap),
        *("--shutdown-timeout", f"{SHUTDOWN_TIMEOUT:g}s", "--purge-every", "50ms"),
    )
    rows: list[Row] = rig.stage(count=3)
    rig.wait_for(rows)
    to_kafka.stall()
    rows += rig.stage(count=50)
    eventually(lambda: metric(relay, "cdc_outbox_in_flight_rows") >= 50, 20, "rows are in flight")
    if "Postgres" in frozen:
        to_postgres.stall()
    if "Kafka" not in frozen:
        to_kafka.resume()
    stop_in_time(relay)
    for link in (to_kafka, to_postgres):
        link.cut()
        link.resume()
    rig.catch_up()
    assert set(rows_of(rig.read())) == set(rows)


def test_a_stop_ends_within_the_shutdown_timeout_while_nobody_can_be_reached(rig: RelayRig, proxy: StartProxy) -> None:
    """Between two sessions, with a connection that is being made."""
    far = proxy(rig.database.server.port)
    relay = rig.stream(
        *("--dsn", make_conninfo(rig.database.dsn, port=far.port)),
        *("--shutdown-timeout", f"{SHUTDOWN_TIMEOUT:g}s", "--purge-every", "50ms"),
    )
    rig.wait_for(rig.stage(count=3))
    far.stall()
    far.cut()
    relay.wait_for_log("starting over", 20)
    eventually(lambda: far.connections > 0, 20, "it tries to connect")
    stop_in_time(relay)


# -- what is stated -------------------------------------------------------------------------------------------------


def test_each_limit_in_the_runbook_names_a_test_that_is_there() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    section = re.search(r"^## Time limits$(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    assert section
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", section[1])
    lines = re.findall(r"^\| (?!---|What)", section[1], re.MULTILINE)
    assert len(lines) >= 6
    assert all("`tests/" in line for line in section[1].splitlines() if re.match(r"\| (?!---|What)", line))
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{test}"
