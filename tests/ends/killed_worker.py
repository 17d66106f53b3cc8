"""The worker that test_killed_worker.py kills: `python -m tests.ends.killed_worker NAME`.

A job has two steps and an effect that is claimed once. Each says in `attempts`, on a connection of its own, that it
begins, and whether what it begins had been committed before. It reads the whole topic, beside others that do too.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import psycopg
from confluent_kafka import OFFSET_STORED, Consumer, Message, TopicPartition

from cdc_outbox import Inbox
from cdc_outbox.inbox import message_id

ATTEMPT = """
insert into attempts (worker, job, phase, committed_before)
select %(worker)s, %(job)s, %(phase)s, exists (select from inbox where id = %(job)s and step = %(step)s)"""
EFFECT = "insert into effects (job, phase) select %s, %s from pg_sleep(random() * 0.02)"


class Worker:
    def __init__(self, name: str, db: psycopg.Connection[Any], diary: psycopg.Connection[Any]) -> None:
        self.name, self.db, self.diary = name, db, diary
        self.inbox = Inbox()

    def work(self, message: Message) -> None:
        job = message_id(message)
        seat = self.inbox.step(self.db, message, "reserve", lambda: self.effect(job, "reserve"))
        assert seat == f"reserve of {job}"
        assert self.inbox.step(self.db, message, "charge", lambda: self.effect(job, "charge")) == f"charge of {job}"
        with self.db.transaction():
            if self.inbox.once(self.db, message):
                self.effect(job, "mail", step="")

    def effect(self, job: str, phase: str, step: str | None = None) -> str:
        step = phase if step is None else step
        self.diary.execute(ATTEMPT, {"worker": self.name, "job": job, "phase": phase, "step": step})
        self.db.execute(EFFECT, [job, phase])
        return f"{phase} of {job}"


def main(name: str) -> None:
    consumer = Consumer(
        {
            "bootstrap.servers": os.environ["KAFKA_BOOTSTRAP_SERVERS"],
            "group.id": f"{os.environ['WORKER_TOPIC']}.{name}",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 20,
        }
    )
    consumer.assign([TopicPartition(os.environ["WORKER_TOPIC"], 0, OFFSET_STORED)])
    url = os.environ["DATABASE_URL"]
    with psycopg.connect(url, autocommit=True) as db, psycopg.connect(url, autocommit=True) as diary:
        worker = Worker(name, db, diary)
        while True:
            message = consumer.poll(1.0)
            if message is not None and not message.error():
                worker.work(message)
                consumer.commit(message=message, asynchronous=False)


if __name__ == "__main__":
    main(sys.argv[1])
