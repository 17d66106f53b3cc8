"""The broker: one for the session, private ones on request; topics, and reading them back.

`CDC_OUTBOX_TEST_BOOTSTRAP` if set; else Apache Kafka; else, without Java or Maven, tansu.
"""

import functools
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, Protocol

import pytest
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from cdc_outbox.embedded import TansuBroker
from tests.certificates import Authority, have_openssl
from tests.kafka_server import KafkaServer, KafkaUnavailable, jars, silent
from tests.secure_kafka import SecureKafka
from tests.waiting import eventually

TANSU_QUIET_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Choice:
    kind: Literal["kafka", "tansu"]
    description: str
    bootstrap: str = ""  # of a broker that someone else runs


@dataclass(frozen=True, slots=True)
class Record:
    """What Kafka stored. `timestamp` in milliseconds since 1970."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: dict[str, bytes | None]
    timestamp: int


@dataclass(frozen=True, slots=True)
class Broker:
    """`server` is None for a broker that someone else runs."""

    kind: Literal["kafka", "tansu"]
    bootstrap: str
    server: KafkaServer | TansuBroker | None

    @property
    def admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.bootstrap}, logger=silent)

    @property
    def secure(self) -> SecureKafka:
        """The session's server, for its other listeners."""
        if not isinstance(self.server, SecureKafka):
            pytest.skip("needs `openssl`, and a broker of our own")
        return self.server

    @property
    def kafka(self) -> KafkaServer:
        """The server, for what only Apache Kafka has."""
        assert isinstance(self.server, KafkaServer), "mark the test kafka_only"
        return self.server

    def create_topic(
        self,
        name: str | None = None,
        *,
        partitions: int = 1,
        config: Mapping[str, str] | None = None,
    ) -> str:
        """Returns the topic's name once every partition has a leader."""
        name = name or f"test_{secrets.token_hex(4)}"
        new = NewTopic(name, partitions, replication_factor=1, config=dict(config or {}))
        admin = self.admin
        admin.create_topics([new])[name].result(15)

        def led() -> bool:
            found = admin.list_topics(name, timeout=5).topics[name].partitions.values()
            return len(found) == partitions and all(p.leader >= 0 for p in found)

        eventually(led, 15, f"leaders for {name}")
        return name

    def delete_topic(self, name: str) -> None:
        admin = self.admin  # the future ends with its client
        admin.delete_topics([name])[name].result(15)

    def read(
        self,
        topic: str,
        *,
        until: Callable[[list[Record]], object] | None = None,
        deadline: float = 30,
    ) -> list[Record]:
        """`read_topic()` here; on tansu, whose end of a topic is wrong, until it rests."""
        quiet = TANSU_QUIET_SECONDS if self.kind == "tansu" and until is None else None
        return read_topic(self.bootstrap, topic, until=until, deadline=deadline, quiet=quiet)


class CreateTopic(Protocol):
    def __call__(self, *, partitions: int = 1, config: Mapping[str, str] | None = None) -> str: ...


def read_topic(
    bootstrap: str,
    topic: str,
    *,
    until: Callable[[list[Record]], object] | None = None,
    deadline: float = 30,
    quiet: float | None = None,
) -> list[Record]:
    """Reads a topic from its beginning, all partitions, without a consumer group.

    Ends when `until(records)` is true; without it, when nothing came for `quiet` seconds; without
    both, at the end that each partition has now. Fails after `deadline` seconds.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "unused",  # librdkafka asks for one; assign() never joins it
            "enable.auto.commit": False,
            "enable.partition.eof": False,
            "fetch.wait.max.ms": 50,
        },
        logger=silent,
    )
    records: list[Record] = []
    try:
        partitions = _assign_all(consumer, topic)
        missing = {} if until or quiet else _ends(consumer, partitions)
        limit = time.monotonic() + deadline
        last = time.monotonic()
        while True:
            if until and until(records):
                return records
            if not until and quiet is None and not missing:
                return records
            if quiet is not None and time.monotonic() - last > quiet and not until:
                return records
            if time.monotonic() > limit:
                raise AssertionError(f"{len(records)} records of {topic} after {deadline:g} s, and not the end")
            for message in consumer.consume(1000, timeout=0.05):
                record = _record(message)
                records.append(record)
                last = time.monotonic()
                if record.offset + 1 >= missing.get(record.partition, record.offset + 2):
                    del missing[record.partition]
    finally:
        consumer.close()


def _assign_all(consumer: Consumer, topic: str) -> list[TopicPartition]:
    metadata = consumer.list_topics(topic, timeout=10).topics[topic]
    if metadata.error:
        raise KafkaException(metadata.error)
    partitions = [TopicPartition(topic, p, OFFSET_BEGINNING) for p in metadata.partitions]
    consumer.assign(partitions)
    return partitions


def _ends(consumer: Consumer, partitions: Sequence[TopicPartition]) -> dict[int, int]:
    """Partition → high watermark, of those that have something to read."""
    ends = {}
    for partition in partitions:
        found = eventually(lambda: _watermarks(consumer, partition), 20, "the partition has a leader")  # noqa: B023
        assert found
        low, high = found
        if high > low:
            ends[partition.partition] = high
    return ends


def _watermarks(consumer: Consumer, partition: TopicPartition) -> tuple[int, int] | None:
    """None while a broker that was frozen has not got its partitions back."""
    try:
        return consumer.get_watermark_offsets(partition, timeout=10)
    except KafkaException as error:
        if error.args[0].code() not in (KafkaError._UNKNOWN_PARTITION, KafkaError.LEADER_NOT_AVAILABLE):
            raise
        return None


def _record(message: Message) -> Record:
    if error := message.error():
        raise KafkaException(error)
    partition, offset = message.partition(), message.offset()
    assert partition is not None
    assert offset is not None
    headers = message.headers() or []
    items = headers.items() if isinstance(headers, dict) else headers
    return Record(
        partition,
        offset,
        _bytes(message.key()),
        _bytes(message.value()),
        {name: _bytes(value) for name, value in items},
        message.timestamp()[1],
    )


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kafka_only: needs what only Apache Kafka has")


def pytest_report_header() -> str:
    return f"broker: {choose_broker().description}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    choice = choose_broker()
    if choice.kind == "kafka":
        return
    skip = pytest.mark.skip(reason=f"needs Apache Kafka; the broker is {choice.description}")
    for item in items:
        if item.get_closest_marker("kafka_only"):
            item.add_marker(skip)


@functools.cache
def choose_broker() -> Choice:
    if bootstrap := os.environ.get("CDC_OUTBOX_TEST_BOOTSTRAP"):
        return Choice("kafka", f"Apache Kafka at {bootstrap}, not ours", bootstrap)
    try:
        jars()
    except KafkaUnavailable as error:
        if os.environ.get("CI") == "true":
            raise pytest.UsageError(f"CI needs Apache Kafka: {error}") from None
        return Choice("tansu", f"tansu, since there is no Apache Kafka ({error})")
    return Choice("kafka", "Apache Kafka in KRaft mode, one node")


def _start(choice: Choice, stack: ExitStack) -> Broker:
    if choice.kind == "kafka":
        kafka = stack.enter_context(KafkaServer()).start()
        return Broker("kafka", kafka.bootstrap, kafka)
    tansu = stack.enter_context(TansuBroker()).start()
    return Broker("tansu", tansu.bootstrap, tansu)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """The session's broker. Shared: stop, pause or kill only a `private_broker`."""
    choice = choose_broker()
    with ExitStack() as stack:
        if choice.bootstrap:
            yield Broker(choice.kind, choice.bootstrap, None)
        elif choice.kind == "kafka" and have_openssl():
            authority = Authority(tmp_path_factory.mktemp("authority"))
            kafka = stack.enter_context(SecureKafka(authority)).start()
            yield Broker("kafka", kafka.bootstrap, kafka)
        else:
            yield _start(choice, stack)


@pytest.fixture
def private_broker() -> Iterator[Broker]:
    """A broker of the test's own, to be paused, killed or restarted (`private_broker.server`)."""
    choice = choose_broker()
    if choice.bootstrap:
        pytest.skip("needs a broker of its own, and CDC_OUTBOX_TEST_BOOTSTRAP is set")
    with ExitStack() as stack:
        yield _start(choice, stack)


@pytest.fixture
def topic(broker: Broker) -> Iterator[CreateTopic]:
    """Makes a topic with a unique name: `topic(partitions=3, config={...})` returns the name."""
    with ExitStack() as stack:

        def create(*, partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
            name = broker.create_topic(partitions=partitions, config=config)
            stack.callback(_delete_quietly, broker, name)
            return name

        yield create


def _delete_quietly(broker: Broker, name: str) -> None:
    try:
        broker.delete_topic(name)
    except KafkaException as error:
        # Best effort: the test may have deleted it, and the broker goes with the session.
        if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
            print(f"topic {name} stays: {error}")
