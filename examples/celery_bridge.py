"""Jobs for Celery: the bridge reads the topic and sends each job on, with the job's id as the task's id.

    python -m examples.celery_bridge                        # the bridge
    celery --app examples.celery_bridge worker              # Celery's workers

The offset is committed once Celery's broker has the task, so a crash in between sends it again under the same id.
Celery itself does not look for repeats: the task claims its id in the inbox.
"""

from __future__ import annotations

import json
import os
from typing import Any

import psycopg
from celery import Celery, Task
from confluent_kafka import Consumer, KafkaException, Message

from cdc_outbox import Inbox
from cdc_outbox.inbox import message_id

inbox = Inbox()
app = Celery("examples", broker=os.environ.get("CELERY_BROKER_URL"))
app.conf.update(
    task_acks_late=True,  # a worker that dies gives its task back
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    # For RabbitMQ: sent means that the broker has it.
    broker_transport_options=json.loads(os.environ.get("CELERY_BROKER_OPTIONS", '{"confirm_publish": true}')),
)


@app.task(bind=True, name="send_receipt")
def send_receipt(self: Task, order: int, customer: str) -> None:
    with psycopg.connect(os.environ["DATABASE_URL"]) as db:
        if inbox.once(db, self.request.id):
            db.execute("insert into receipts (customer, order_id) values (%s, %s)", [customer, order])


def send_on(message: Message) -> None:
    """The task's name is the job's, its arguments are the job's args."""
    headers: dict[str, Any] = dict(message.headers() or [])
    args = json.loads(message.value() or b"{}")
    app.send_task(headers["task"].decode(), kwargs=args, task_id=message_id(message))


def main() -> None:
    consumer = Consumer(
        {
            "bootstrap.servers": os.environ["KAFKA_BOOTSTRAP_SERVERS"],
            "group.id": os.environ.get("WORKER_GROUP", "celery-bridge"),
            "group.instance.id": os.environ.get("WORKER_NAME", "bridge-1"),
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([os.environ.get("WORKER_TOPIC", "outbox")])
    while True:
        message = consumer.poll(0.5)
        if message is None:
            continue
        if error := message.error():
            raise KafkaException(error)
        send_on(message)
        consumer.commit(message=message, asynchronous=False)


if __name__ == "__main__":
    main()
