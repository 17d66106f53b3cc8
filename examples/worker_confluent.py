"""A worker with confluent-kafka. The effect and the claim are one transaction; the offset is committed after it.

Whatever goes wrong ends the process: started again, it gets the same record again, and the inbox knows what of it was
done. `group.instance.id` lets it take its place in the group at once, instead of waiting for its old self to expire.
"""

from __future__ import annotations

import json
import os
import signal
from types import FrameType
from typing import Any

import psycopg
from confluent_kafka import Consumer, KafkaException, Message

from cdc_outbox import Inbox

inbox = Inbox()


def send_receipt(db: psycopg.Connection[Any], message: Message, args: dict[str, Any]) -> None:
    """One effect, in this database: once."""
    with db.transaction():
        if inbox.once(db, message):
            db.execute("insert into receipts (customer, order_id) values (%(customer)s, %(order)s)", args)


def ship_order(db: psycopg.Connection[Any], message: Message, args: dict[str, Any]) -> None:
    """Phases that take a while: each commits by itself, and none that did is done again."""
    label = inbox.step(db, message, "label", lambda: f"label for order {args['order']}")
    inbox.step(db, message, "parcel", lambda: db.execute("insert into parcels (label) values (%s)", [label]).rowcount)


TASKS = {"send_receipt": send_receipt, "ship_order": ship_order}


def work(db: psycopg.Connection[Any], message: Message) -> None:
    headers = dict(message.headers() or [])
    task, value = headers["task"], message.value()
    assert isinstance(task, bytes)
    assert isinstance(value, bytes)
    TASKS[task.decode()](db, message, json.loads(value))


def main() -> None:
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    consumer = Consumer(
        {
            "bootstrap.servers": os.environ["KAFKA_BOOTSTRAP_SERVERS"],
            "group.id": os.environ.get("WORKER_GROUP", "receipts"),
            "group.instance.id": os.environ.get("WORKER_NAME", "worker-1"),
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([os.environ.get("WORKER_TOPIC", "outbox")])
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as db:
        while not stopping:
            message = consumer.poll(0.5)
            if message is None:
                continue
            if error := message.error():
                raise KafkaException(error)
            work(db, message)
            consumer.commit(message=message, asynchronous=False)
    consumer.close()


if __name__ == "__main__":
    main()
