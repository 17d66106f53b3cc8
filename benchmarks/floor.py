"""The least that a row costs with psycopg and confluent-kafka: it is received, copied once, and produced as the relay
does it, with a key, three headers and a delivery report. Nothing is decoded, gated, kept or confirmed.

`python -m benchmarks.floor DSN SLOT TOPIC BOOTSTRAP END` streams to END and exits. What it costs, no relay over these
two libraries can save.
"""

import os
import select
import sys
import time

from confluent_kafka import KafkaError, Message, Producer
from psycopg import pq

from cdc_outbox.kafka import DEFAULTS
from cdc_outbox.lsn import parse_lsn
from cdc_outbox.pgoutput import INSERT
from cdc_outbox.walsender import XLOG_DATA, XLOG_DATA_HEADER_BYTES, decode_keepalive
from tests.kafka_server import silent

REPORTS_EVERY = 1000
HEADERS: list[tuple[str, str | bytes | None]] = [("id", b"1234567"), ("task", b"task_1"), ("commit_lsn", b"0/1234567")]


def main(dsn: str, slot: str, topic: str, bootstrap: str, end: str) -> int:
    acknowledged = 0

    def report(error: KafkaError | None, record: Message) -> None:
        nonlocal acknowledged
        acknowledged += error is None

    connection = pq.PGconn.connect(f"{dsn} replication=database".encode())
    query = f"START_REPLICATION SLOT {slot} LOGICAL 0/0 (proto_version '1', publication_names 'cdc_outbox')"
    if connection.exec_(query.encode()).status != pq.ExecStatus.COPY_BOTH:
        sys.exit(f"error: {connection.get_error_message()}")
    connection.nonblocking = 1
    producer = Producer({**DEFAULTS, "bootstrap.servers": bootstrap}, logger=silent)
    print("streaming", slot, file=sys.stderr, flush=True)
    poller = select.poll()
    poller.register(connection.socket, select.POLLIN)
    end_lsn, timestamp = parse_lsn(end), int(time.time() * 1000)
    get, produce, poll = connection.get_copy_data, producer.produce, producer.poll
    rows, dry = 0, False
    while True:
        length, view = get(1)
        if length <= 0:
            if dry:
                poll(0)
                poller.poll(1)
            connection.consume_input()
            dry = True
            continue
        dry = False
        message = bytes(view)
        if message[0] != XLOG_DATA:
            if decode_keepalive(message).wal_end >= end_lsn:
                break
        elif message[XLOG_DATA_HEADER_BYTES] == INSERT:
            while True:
                try:
                    produce(topic, message, b"task_%d" % (rows % 10), -1, report, None, timestamp, HEADERS)
                    break
                except BufferError:
                    poll(0.01)
            rows += 1
            if rows % REPORTS_EVERY == 0:
                poll(0)
    producer.flush()
    return 0 if acknowledged == rows else 1


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # as fast as pg_recvlogical ends
