"""Everything that is in the topic at the end, a record at a time: a run of half an hour leaves millions."""

import json
import time
from collections.abc import Iterator

from confluent_kafka import (
    OFFSET_BEGINNING,
    TIMESTAMP_LOG_APPEND_TIME,
    Consumer,
    KafkaException,
    Message,
    TopicPartition,
)

from cdc_outbox.lsn import parse_lsn
from tests.chaos.check import Arrival
from tests.kafka_server import silent

CONFIG = {"message.timestamp.type": "LogAppendTime"}
"""A record's timestamp is then when the broker stored it, before it acknowledged it."""
DEADLINE_SECONDS = 30.0
"""Without any record."""


def arrivals(bootstrap: str, topic: str) -> Iterator[Arrival]:
    """Up to where each partition ends now."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "unused", "enable.auto.commit": False}, logger=silent
    )
    try:
        partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
        ends = {p: consumer.get_watermark_offsets(TopicPartition(topic, p), timeout=30)[1] for p in partitions}
        consumer.assign([TopicPartition(topic, p, OFFSET_BEGINNING) for p in partitions])
        missing = {p: end for p, end in ends.items() if end}
        heard = time.monotonic()
        while missing:
            for message in consumer.consume(5000, timeout=0.5):
                heard = time.monotonic()
                arrival, offset = _arrival(message)
                if offset < ends[arrival.partition]:
                    yield arrival
                if offset + 1 >= ends[arrival.partition]:
                    missing.pop(arrival.partition, None)
            if time.monotonic() - heard > DEADLINE_SECONDS:
                raise TimeoutError(f"no record of {topic} for {DEADLINE_SECONDS:g} s, and not the end")
    finally:
        consumer.close()


def _arrival(message: Message) -> tuple[Arrival, int]:
    if error := message.error():
        raise KafkaException(error)
    kind, appended = message.timestamp()
    partition, offset, value = message.partition(), message.offset(), message.value()
    headers = dict(message.headers() or [])
    task, commit_lsn = headers["task"], headers["commit_lsn"]
    assert kind == TIMESTAMP_LOG_APPEND_TIME
    assert partition is not None
    assert offset is not None
    assert isinstance(task, bytes)
    assert isinstance(commit_lsn, bytes)
    assert value is not None
    return Arrival(task.decode(), json.loads(value)["n"], partition, appended, parse_lsn(commit_lsn.decode())), offset
