"""A topic that takes less than others: known before the first record goes there, so that nothing overtakes what it
refuses."""

import pytest

from tests.fix_kafka import CreateTopic
from tests.fix_proxy import StartProxy
from tests.relay_rig import RelayRig, Row, metric, rows_of

pytestmark = pytest.mark.kafka_only

LIMIT = 20_000
TOO_LARGE = 30_000
MANY_BATCHES = ("-X", "batch.size=15000")


@pytest.fixture
def small(rig: RelayRig, topic: CreateTopic) -> str:
    rig.topic = topic(config={"max.message.bytes": str(LIMIT)})
    return rig.topic


def stage_behind_poison(rig: RelayRig, task: str) -> list[Row]:
    """A row that the topic refuses, then more than fits into five batches, which are returned."""
    rig.stage(task, padding=TOO_LARGE)
    return [row for _ in range(100) for row in rig.stage(task, padding=900)]


def test_nothing_overtakes_a_producers_first_batch_where_rows_name_the_topic(rig: RelayRig, small: str) -> None:
    options = ("--topic", small[:-1] + "{task}", *MANY_BATCHES)
    rows = stage_behind_poison(rig, small[-1])
    halted = rig.command.run("stream", *rig.stream_options, *options)
    assert halted.returncode == 5, halted.stderr
    assert f"limit {LIMIT} bytes" in halted.stderr
    assert rig.read() == []
    rig.catch_up(*options, "--on-poison", "dead-letter")
    assert rows_of(rig.read()) == rows


def test_nothing_overtakes_a_producers_first_batch_where_kafka_was_away_at_the_start(
    rig: RelayRig, small: str, proxy: StartProxy
) -> None:
    kafka = rig.broker.kafka
    rows = stage_behind_poison(rig, "mail")
    relay = rig.stream("--bootstrap-servers", kafka.proxied_bootstrap, *MANY_BATCHES, "--on-poison", "dead-letter")
    assert metric(relay, "cdc_outbox_in_flight_rows") == 0  # what cannot be sent yet waits in the WAL
    proxy(kafka.proxied_port, listen_port=kafka.proxy_port)
    rig.wait_for(rows)
    assert relay.terminate() == 0
    assert rows_of(rig.read()) == rows


def test_a_running_relay_makes_smaller_batches_for_a_topic_that_it_meets(rig: RelayRig) -> None:
    """What is on its way to other topics arrives first, and is not sent again."""
    prefix = rig.topic
    large = rig.broker.create_topic(f"{prefix}.mail")
    small = rig.broker.create_topic(f"{prefix}.sms", config={"max.message.bytes": str(LIMIT)})
    relay = rig.stream("--topic", prefix + ".{task}")
    mail = rig.stage("mail", 500)
    sms = [row for _ in range(60) for row in rig.stage("sms", padding=900)]
    mail += rig.stage("mail", 500)

    rig.topic = large
    assert rows_of(rig.wait_for(mail)) == mail
    rig.topic = small
    assert rows_of(rig.wait_for(sms)) == sms
    assert relay.terminate() == 0
    assert "starting over" not in relay.stderr_text()
