"""What really stands in the topic after a drain."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Message, TopicPartition

from benchmarks.rig import PARTITIONS
from tests.kafka_server import silent

QUIET_SECONDS = 1.0
"""So long nothing more comes once everything is there: then it is the end (tansu's watermarks do not tell)."""
PATIENCE_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Contents:
    """Counts. `missing` is a gap; `disordered` are first occurrences behind a later row of the same key."""

    records: int
    missing: int
    repeated: int
    disordered: int
    unknown: int

    @property
    def void(self) -> bool:
        return bool(self.missing or self.repeated or self.disordered or self.unknown)


def check_topic(bootstrap: str, topic: str, rows: int) -> Contents:
    """Against the ids 1 to `rows`, which one session committed in this order."""
    seen = bytearray(rows + 1)
    last: dict[bytes | str | None, int] = {}
    records = distinct = disordered = unknown = 0
    consumer = subscribe(bootstrap, topic)
    try:
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < (QUIET_SECONDS if distinct >= rows else PATIENCE_SECONDS):
            for message in consumer.consume(10_000, timeout=0.2):
                quiet_since = time.monotonic()
                records += 1
                identity = row_id(message)
                if not 1 <= identity <= rows:
                    unknown += 1
                elif not seen[identity]:
                    seen[identity] = 1
                    distinct += 1
                    key = message.key()
                    disordered += last.get(key, 0) > identity
                    last[key] = identity
    finally:
        consumer.close()
    return Contents(records, rows - distinct, records - distinct - unknown, disordered, unknown)


def subscribe(bootstrap: str, topic: str) -> Consumer:
    """Reads every partition from its beginning, without a group."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "unused", "enable.auto.commit": False}, logger=silent
    )
    consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in range(PARTITIONS)])
    return consumer


def row_id(message: Message) -> int:
    if error := message.error():
        raise KafkaException(error)
    for name, value in _headers(message):
        if name == "id" and value is not None:
            return int(value)
    return 0


def _headers(message: Message) -> Iterator[tuple[str, str | bytes | None]]:
    headers = message.headers() or []
    yield from headers.items() if isinstance(headers, dict) else headers
