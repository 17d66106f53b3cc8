"""The worker that `verify` plays: it reads the topic, and remembers every record of this run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from confluent_kafka import OFFSET_BEGINNING, Consumer, Message, TopicPartition

from cdc_outbox.errors import DeliveryFailed

KAFKA_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Record:
    id: str
    task: str
    value: bytes

    @property
    def n(self) -> int:
        return int(json.loads(self.value)["n"])


class Worker:
    """Reads the topic from where it ended; every record of this run, in order."""

    def __init__(self, consumer: Consumer, topic: str, *, ours: bool, run: str) -> None:
        """`ours`: the topic is new."""
        self._consumer, self._run = consumer, run
        found = consumer.list_topics(topic, timeout=KAFKA_SECONDS).topics[topic].partitions
        # Positions that are known now: "the end" would be wherever it is when the first fetch asks.
        consumer.assign(
            [
                TopicPartition(topic, number, OFFSET_BEGINNING if ours else self._end(topic, number))
                for number in found or [0]
            ]
        )
        self.records: list[Record] = []
        self.ids: set[str] = set()

    def _end(self, topic: str, partition: int) -> int:
        _, end = self._consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=KAFKA_SECONDS)
        return int(end)

    def read_until(
        self, done: Callable[[], bool], seconds: float, seen: Callable[[list[Record]], None] | None = None
    ) -> bool:
        """False if it was not done in time. `seen` is called with each batch as soon as it is here."""
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                return False
            batch = [record for message in self._consumer.consume(500, 0.02) if (record := self._record(message))]
            if batch and seen is not None:
                seen(batch)
            self.records += batch
            self.ids |= {record.id for record in batch}
        return True

    def _record(self, message: Message) -> Record | None:
        """None for a record of somebody else's."""
        if error := message.error():
            raise DeliveryFailed(f"reading the topic: {error.str()}")
        headers = dict(message.headers() or [])
        task = _text(headers.get("task"))
        if not task.startswith(self._run):
            return None
        value = message.value() or b""
        return Record(_text(headers.get("id")), task, value if isinstance(value, bytes) else value.encode())


def _text(value: str | bytes | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""
