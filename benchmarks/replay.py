"""The decode-and-produce loop alone: a stream made up in memory, and a producer whose broker is not there.

Run under callgrind by `benchmarks.instructions`; on its own it prints microseconds of CPU a row.
"""

import os
import struct
import sys
import time
from collections.abc import Iterator

from cdc_outbox.event import RecordFormat
from cdc_outbox.inflight import InFlight
from cdc_outbox.kafka import KafkaProducer
from cdc_outbox.reader import Reader
from cdc_outbox.topic_gate import TopicGate
from cdc_outbox.visibility import VisibilityGate

_COLUMNS = (("id", 20), ("task", 25), ("args", 3802), ("key", 25), ("headers", 3802), ("created_at", 1184))
_OID = 16_400
_XID = 1_000
_NOBODY = "127.0.0.1:1"


def stream(rows: int, rows_per_transaction: int) -> Iterator[bytes]:
    """What a walsender sends for that many rows of about 200 bytes."""
    position = 0x1_0000_0000
    inserts = [_xlog_data(_insert(row)) for row in range(1000)]  # not made anew each time: that would be counted too
    for first in range(0, rows, rows_per_transaction):
        yield _xlog_data(b"B" + struct.pack(">qqI", position, 846_000_000_000_000 + first, _XID))
        if not first:
            yield _xlog_data(_relation())
        for row in range(first, min(first + rows_per_transaction, rows)):
            yield inserts[row % len(inserts)]
        yield _xlog_data(b"C\0" + struct.pack(">qqq", position, position + 48, 846_000_000_000_000))
        position += 0x1_0000


def _xlog_data(message: bytes) -> bytes:
    return b"w" + struct.pack(">qqq", 0, 0, 0) + message


def _relation() -> bytes:
    columns = b"".join(b"\0%s\0" % name.encode() + struct.pack(">Ii", oid, -1) for name, oid in _COLUMNS)
    return b"R" + struct.pack(">I", _OID) + b"public\0outbox\0d" + struct.pack(">H", len(_COLUMNS)) + columns


def _insert(row: int) -> bytes:
    args = b'{"order": %d, "text": "%s"}' % (row, b"x" * 170)
    values = (b"%d" % row, b"task_%d" % (row % 10), args, None, None, b"2026-01-01 00:00:00.123456+00")
    texts = b"".join(b"n" if value is None else b"t" + struct.pack(">I", len(value)) + value for value in values)
    return b"I" + struct.pack(">I", _OID) + b"N" + struct.pack(">H", len(values)) + texts


def replay(rows: int, rows_per_transaction: int) -> float:
    """CPU seconds of this thread."""
    messages = iter(list(stream(rows, rows_per_transaction)))
    gate = VisibilityGate()
    gate.learn(f"{_XID + 1}:{_XID + 1}:")
    queue = {"queue.buffering.max.messages": "2000000", "queue.buffering.max.kbytes": "2000000"}
    producer = KafkaProducer(_NOBODY, {**queue, "reconnect.backoff.ms": "60000", "reconnect.backoff.max.ms": "60000"})
    reader = Reader(
        lambda: next(messages, None),
        producer,
        ledger := InFlight(),
        gate,
        TopicGate(producer, {RecordFormat().topic: 1 << 30}, lambda: None),
        RecordFormat(),
        is_ours=lambda relation: True,
        set_aside=lambda transaction, letter: None,
    )
    started = time.thread_time()
    while reader.read(only_finish=False):
        pass
    spent = time.thread_time() - started
    if ledger.oldest is None or ledger.open is not None or reader.failure is not None:
        raise AssertionError("the stream was not taken")
    return spent


if __name__ == "__main__":
    count, per_transaction = map(int, sys.argv[1:])
    print(f"{replay(count, per_transaction) / count * 1e6:.2f} µs a row", flush=True)
    os._exit(0)  # nothing is to be delivered
