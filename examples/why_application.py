"""The application of `why.py`, which kills it: `python why_application.py WAY DSN BOOTSTRAP_SERVERS`.

Eight threads place orders, each with a job, in one of the ways; one transaction in ten fails, one in 25 takes long.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import sys
import threading
from typing import Any

import psycopg
from confluent_kafka import Producer

from cdc_outbox import stage

THREADS = 8
FAILED, LONG = 0.10, 0.04  # of the transactions
WORK_SECONDS, LONG_SECONDS = 0.010, 0.300  # what else a transaction does


class Failed(Exception):
    """Something about an order was wrong; its transaction rolls back."""


class Application:
    def __init__(self, way: str, dsn: str, bootstrap: str) -> None:
        self.place_order = getattr(self, way)
        self.topic, self.dsn = way, dsn
        self.producer = Producer({"bootstrap.servers": bootstrap}, logger=logging.Logger("silent"))

    def in_transaction(self, db: psycopg.Connection[Any]) -> None:
        with db.transaction():
            order = self.insert_order(db)
            self.enqueue(order)
            self.do_the_rest(db)

    def in_transaction_with_retries(self, db: psycopg.Connection[Any]) -> None:
        self.in_transaction(db)

    def after_commit(self, db: psycopg.Connection[Any]) -> None:
        with db.transaction():
            order = self.insert_order(db)
            self.do_the_rest(db)
        self.enqueue(order)

    def outbox(self, db: psycopg.Connection[Any]) -> None:
        with db.transaction():
            order = self.insert_order(db)
            stage(db, "send_receipt", {"order": order})
            self.do_the_rest(db)

    def insert_order(self, db: psycopg.Connection[Any]) -> int:
        ((order,),) = db.execute("insert into orders default values returning id").fetchall()
        return int(order)

    def do_the_rest(self, db: psycopg.Connection[Any]) -> None:
        seconds = LONG_SECONDS if random.random() < LONG else WORK_SECONDS * random.random()
        db.execute("select pg_sleep(%s)", [seconds])
        if random.random() < FAILED:
            raise Failed

    def enqueue(self, order: int) -> None:
        """Returns when the broker has it."""
        acknowledged = threading.Event()
        self.producer.produce(self.topic, json.dumps({"order": order}), on_delivery=lambda *_: acknowledged.set())
        while not acknowledged.is_set():
            self.producer.poll(0.001)

    def run(self) -> None:
        for _ in range(THREADS):
            threading.Thread(target=self._place_orders).start()

    def _place_orders(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as db:
            while True:
                with contextlib.suppress(Failed):
                    self.place_order(db)


if __name__ == "__main__":
    Application(*sys.argv[1:]).run()
