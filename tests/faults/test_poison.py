"""A record that Kafka will never take: named, never lost, and the only kind that may be set aside."""

import json
import subprocess
from dataclasses import dataclass, field

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # not in its __all__
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from tests.fix_kafka import CreateTopic
from tests.relay_rig import RelayRig, metric, rows_of, standard_check
from tests.waiting import eventually

LIMIT = 20_000
TOO_LARGE = 30_000


@dataclass
class SizeLimit:
    """Where a record of more than LIMIT bytes is refused: by the client or by the topic."""

    where: str
    rig: RelayRig
    options: list[str] = field(default_factory=list)

    def raise_it(self) -> None:
        if self.where == "client":
            self.options = []
        else:
            set_topic_limit(self.rig, 1_000_000)

    def stream(self, *options: object) -> subprocess.CompletedProcess[str]:
        """A relay that is expected to end by itself."""
        return self.rig.command.run("stream", *self.rig.stream_options, *self.options, *options)


def set_topic_limit(rig: RelayRig, limit: int) -> None:
    entry = ConfigEntry("max.message.bytes", str(limit), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, rig.topic, incremental_configs=[entry])
    admin = rig.broker.admin
    admin.incremental_alter_configs([resource])[resource].result(10)


@pytest.fixture(params=["client", pytest.param("topic", marks=pytest.mark.kafka_only)])
def size_limit(request: pytest.FixtureRequest, rig: RelayRig, topic: CreateTopic) -> SizeLimit:
    if request.param == "client":
        return SizeLimit("client", rig, ["-X", f"message.max.bytes={LIMIT}"])
    rig.topic = topic(config={"max.message.bytes": str(LIMIT)})
    return SizeLimit("topic", rig)


def test_a_record_too_large_halts_the_relay_before_anything_behind_it(size_limit: SizeLimit) -> None:
    """C19 (confluentinc/librdkafka#3125, estuary/connectors#3072)."""
    rig = size_limit.rig
    before = rig.stage(count=20)
    poison = rig.stage(padding=TOO_LARGE)
    size = len(rig.database.fetch_value("select args::text from outbox where id = 21"))
    after = rig.stage(count=20) + rig.stage("other", 20)

    ends = []
    for _ in range(2):
        halted = size_limit.stream()
        assert halted.returncode == 5, halted.stderr
        last = halted.stderr.splitlines()[-1]
        assert f"row id=21 task=mail, {size} bytes" in last
        assert f"limit {LIMIT} bytes" in last
        assert "--on-poison dead-letter" in last
        assert "Traceback" not in halted.stderr
        assert "padding" not in halted.stderr
        assert standard_check(before, [], rig.read()) <= len(before)
        ends.append(rig.ends())
    assert ends[0] == ends[1]  # the next start comes to the same end, and repeats nothing
    assert rig.database.fetch_value("select count(*) from outbox_dead_letter") == 0

    size_limit.raise_it()
    rig.catch_up(*size_limit.options)
    records = rig.read()
    standard_check(before + poison + after, [], records)
    assert rows_of(records)[-41:] == poison + after


def test_what_stands_before_it_in_its_transaction_may_be_repeated_and_nothing_overtakes_it(
    size_limit: SizeLimit,
) -> None:
    rig = size_limit.rig
    writer = rig.database.connect(autocommit=False)
    rows = rig.stage(count=5, on=writer)
    rows += rig.stage(on=writer, padding=TOO_LARGE)
    rows += rig.stage(count=5, on=writer)
    writer.commit()
    rows += rig.stage(count=5000)
    assert size_limit.stream().returncode == 5
    size_limit.raise_it()
    rig.catch_up(*size_limit.options)
    assert standard_check(rows, [], rig.read()) <= 2 * 5  # the batch was refused, then the row, then all arrived


def test_a_dead_letter_is_stored_whole_and_its_followers_arrive_in_order(size_limit: SizeLimit) -> None:
    rig = size_limit.rig
    rows = rig.stage(count=20)
    writer = rig.database.connect(autocommit=False)
    rows += rig.stage(count=2, on=writer)
    poison = rig.stage(on=writer, padding=TOO_LARGE)
    rows += rig.stage(count=2, on=writer)
    poison += rig.stage(on=writer, padding=TOO_LARGE)
    writer.commit()
    rows += rig.stage(count=3000) + rig.stage("other", 20)
    relay = rig.stream(*size_limit.options, "--on-poison", "dead-letter", "--purge-every", "200ms")
    eventually(lambda: rig.backlog == 0, 30, "the position moves on, and everything is purged")
    assert metric(relay, "cdc_outbox_dead_letters_total") == 2
    assert relay.terminate() == 0
    repeats = standard_check(rows, [], rig.read())
    assert repeats <= 20 + 4  # the transactions that stood in a refused batch with it

    letters = rig.database.fetch(
        """select row_id, task, topic, size, size_limit, "row" from outbox_dead_letter order by ordinal"""
    )
    for (_, n), (row_id, task, topic, size, limit, row) in zip(poison, letters, strict=True):
        args = json.loads(row["args"])
        assert (row_id, task, topic) == (str(n + 1), "mail", rig.topic)
        assert (args["n"], len(args["padding"])) == (n, TOO_LARGE)
        assert (size, limit) == (len(row["args"]), LIMIT)


@pytest.mark.kafka_only
def test_a_batch_larger_than_the_topic_takes_is_no_poison(rig: RelayRig, topic: CreateTopic) -> None:
    """C19: Kafka's limit is for a batch, and each row fits."""
    rig.topic = topic(config={"max.message.bytes": str(LIMIT)})
    rows = []
    for _ in range(200):
        rows += rig.stage(count=20, padding=900)
    log = rig.catch_up()
    assert standard_check(rows, [], rig.read()) == 0
    assert log.count("starting over") <= 1


@pytest.mark.kafka_only
def test_a_topic_limit_lowered_under_a_running_relay_is_no_poison(rig: RelayRig) -> None:
    relay = rig.stream()
    rows = rig.stage(count=20, padding=900)
    rig.wait_for(rows)
    set_topic_limit(rig, LIMIT)
    for _ in range(100):
        rows += rig.stage(count=100, padding=900)
    rig.wait_for(rows)
    assert relay.terminate() == 0
    standard_check(rows, [], rig.read())
    assert relay.stderr_text().count("starting over") <= 1


def test_a_row_without_a_legal_topic_is_poison(rig: RelayRig) -> None:
    rig.stage("no topic / has this name")
    options = ("--topic", f"{rig.topic}{{task}}")
    halted = rig.command.run("stream", *rig.stream_options, *options)
    assert halted.returncode == 5
    assert "row id=1 task=no topic / has this name" in halted.stderr
    rows = rig.stage("")
    rig.catch_up(*options, "--on-poison", "dead-letter")
    assert rows_of(rig.read()) == rows


@pytest.mark.kafka_only
def test_nothing_overtakes_a_record_that_became_too_large_under_a_running_relay(rig: RelayRig) -> None:
    relay = rig.stream("-X", "batch.size=15000")  # its followers are in batches of their own
    before = rig.stage(count=20)
    rig.wait_for(before)
    set_topic_limit(rig, LIMIT)
    relay.pause()
    poison = rig.stage(padding=TOO_LARGE)
    after = [row for _ in range(20) for row in rig.stage(count=10, padding=900)]
    relay.resume()
    assert relay.wait() == 5
    standard_check(before, poison + after, rig.read())
    set_topic_limit(rig, 1_000_000)
    rig.catch_up()
    standard_check(before + poison + after, [], rig.read())
