"""Four ways to start a job with an order, under the same load and the same kills, and what becomes of them.

An application places orders, and is killed (-9) again and again; so is the relay, where there is one. A worker gets
the jobs, and writes a receipt for each one whose order it finds. Afterwards the database says what is true: which
orders there are, and which of them have a receipt.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import OFFSET_BEGINNING, Consumer, Message, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from cdc_outbox import Inbox
from cdc_outbox.embedded import PostgresServer, ServerProcess, TansuBroker, free_port, postgres_bindir
from cdc_outbox.statements import statements
from cdc_outbox.story import COMMAND, FOREIGN, Relay

KILLS, ORDERS_EACH = 7, 110
WORKERS = 16
PAUSES = (0.01, 0.02, 0.04, 0.08)  # seconds before a worker that retries looks for the order again
QUIET_SECONDS, PATIENCE_SECONDS = 0.7, 30.0
SILENT = logging.Logger("silent")
APPLICATION = str(Path(__file__).with_name("why_application.py"))

TABLES = """
create table orders (id bigint generated always as identity primary key);
create table receipts (order_id bigint not null)"""

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}


class Program(ServerProcess):
    """A process that dies with this one."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(None, None, die_with_parent=True)

    def start(self, *args: str, **environment: str) -> None:
        self._spawn(args, {**ENVIRONMENT, **environment}, signal.SIGKILL)

    def wait(self) -> None:
        self._wait_end(PATIENCE_SECONDS)


class Worker:
    """Some threads; each takes a job, looks for its order, and writes the receipt if the order is there."""

    def __init__(self, dsn: str, pauses: tuple[float, ...] = (), inbox: Inbox | None = None) -> None:
        self.dsn, self.pauses, self.inbox = dsn, pauses, inbox
        self.ran: Counter[int] = Counter()
        self.in_vain: Counter[int] = Counter()
        self._thread = threading.local()
        self._connections: list[psycopg.Connection[Any]] = []
        self._pool = ThreadPoolExecutor(WORKERS, initializer=self._connect)
        self._jobs: list[Future[None]] = []

    def take(self, message: Message) -> None:
        self._jobs.append(self._pool.submit(self._work, message))

    def finish(self) -> None:
        """Raises what a job raised."""
        self._pool.shutdown()
        for connection in self._connections:
            connection.close()
        for job in self._jobs:
            job.result()

    def _connect(self) -> None:
        self._thread.db = psycopg.connect(self.dsn, autocommit=True)
        self._connections.append(self._thread.db)

    def _work(self, message: Message) -> None:
        order = json.loads(message.value() or b"")["order"]
        self.ran[order] += 1
        for pause in (0.0, *self.pauses):
            time.sleep(pause)
            if self._write_receipt(self._thread.db, message, order):
                return
        self.in_vain[order] += 1

    def _write_receipt(self, db: psycopg.Connection[Any], message: Message, order: int) -> bool:
        """False if there is no such order."""
        with db.transaction():
            if not db.execute("select from orders where id = %s", [order]).rowcount:
                return False
            if self.inbox is None or self.inbox.once(db, message):
                db.execute("insert into receipts values (%s)", [order])
            return True


@dataclass(frozen=True, slots=True)
class Outcome:
    """In the order of the table's columns."""

    orders: int
    jobs: int
    too_early: int
    for_nothing: int
    lost: int
    twice: int


HEAD = """
                                 orders      jobs      ran for no   orders w/o  receipts
                              committed       run    early    order    receipt     twice"""


class Way:
    """One of them, on a database and a topic of its own."""

    def __init__(self, postgres: PostgresServer, broker: TansuBroker, name: str, parts: contextlib.ExitStack) -> None:
        self.name, self.bootstrap = name, broker.bootstrap
        with psycopg.connect(postgres.dsn(), autocommit=True) as maintenance:
            maintenance.execute(f"create database {name}".encode())
        self.dsn = postgres.dsn(name)
        self.db = parts.enter_context(psycopg.connect(self.dsn, autocommit=True))
        self.db.execute(TABLES)
        admin = AdminClient({"bootstrap.servers": broker.bootstrap}, logger=SILENT)
        admin.create_topics([NewTopic(name, 1, 1)])[name].result(PATIENCE_SECONDS)
        # This broker looks for new records only after that wait; Kafka answers as soon as it has one.
        properties = {"bootstrap.servers": broker.bootstrap, "group.id": "why", "fetch.wait.max.ms": 5}
        self.consumer = Consumer(properties, logger=SILENT)
        parts.callback(self.consumer.close)
        # assign() and no subscribe(): one reader needs no group, and waits for none to form.
        self.consumer.assign([TopicPartition(name, 0, OFFSET_BEGINNING)])
        self.application = parts.enter_context(Program("the application"))
        self.worker = Worker(self.dsn)

    def play(self) -> Outcome:
        for kill in range(KILLS):
            enough = self.count("orders") + ORDERS_EACH
            self.application.start(sys.executable, APPLICATION, self.name, self.dsn, self.bootstrap)
            self.work_until(lambda enough=enough: self.count("orders") >= enough)  # type: ignore[misc]
            self.work_for(0.1 * random.random())
            self.application.kill9()
            self.killed(kill)
        self.finish()
        self.worker.finish()
        return self.outcome()

    def killed(self, kill: int) -> None:
        """What else happens while the application is down."""

    def finish(self) -> None:
        self.work_until(lambda: False, QUIET_SECONDS)

    def work_until(self, done: Callable[[], bool], quiet: float = PATIENCE_SECONDS) -> None:
        """Hands records to the worker until then, or until none has come for `quiet` seconds."""
        last = time.monotonic()
        while time.monotonic() - last < quiet and not done():
            for message in self.consumer.consume(100, timeout=0.02):
                if message.error() is None:
                    self.worker.take(message)
                    last = time.monotonic()

    def work_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.work_until(lambda: time.monotonic() >= end)

    def count(self, table: str) -> int:
        ((count,),) = self.db.execute(f"select count(*) from {table}".encode()).fetchall()
        return int(count)

    def outcome(self) -> Outcome:
        orders = {order for (order,) in self.db.execute("select id from orders")}
        receipts = Counter(order for (order,) in self.db.execute("select order_id from receipts"))
        ran, in_vain = self.worker.ran, self.worker.in_vain
        return Outcome(
            orders=len(orders),
            jobs=ran.total(),
            too_early=sum(times for order, times in in_vain.items() if order in orders),
            for_nothing=sum(times for order, times in ran.items() if order not in orders),
            lost=len(orders - receipts.keys()),
            twice=receipts.total() - len(receipts),
        )


class WithRetries(Way):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.worker.pauses = PAUSES


class WithOutbox(Way):
    """And with a relay, which is killed too."""

    def __init__(self, postgres: PostgresServer, broker: TansuBroker, name: str, parts: contextlib.ExitStack) -> None:
        super().__init__(postgres, broker, name, parts)
        self.worker.inbox = Inbox()
        for statement in statements("inbox.sql", {"schema": "public", "inbox": "inbox", "inbox_done_at": "done_at"}):
            self.db.execute(statement.encode())
        self.environment = {
            **ENVIRONMENT,
            "CDC_OUTBOX_DSN": self.dsn,
            "CDC_OUTBOX_BOOTSTRAP_SERVERS": self.bootstrap,
            "CDC_OUTBOX_TOPIC": name,
            "CDC_OUTBOX_METRICS_ADDRESS": f"127.0.0.1:{free_port()}",
        }
        init = parts.enter_context(Program("init-slot"))
        init.start(*COMMAND, "init-slot", **self.environment)
        init.wait()
        self.relay = parts.enter_context(Relay(None, None, die_with_parent=True)).start(self.environment)

    def killed(self, kill: int) -> None:
        if kill % 2:
            self.relay.kill9()
            self.relay.start(self.environment)

    def finish(self) -> None:
        missing = "select count(*) from orders where not exists (select from receipts where order_id = orders.id)"
        self.work_until(lambda: self.db.execute(missing.encode()).fetchall() == [(0,)])
        super().finish()


WAYS: dict[str, tuple[str, type[Way]]] = {
    "in_transaction": ("enqueue in the transaction", Way),
    "in_transaction_with_retries": (f"the same, and retry {sum(PAUSES) * 1000:.0f} ms", WithRetries),
    "after_commit": ("enqueue after the commit", Way),
    "outbox": ("outbox, relay, inbox", WithOutbox),
}

ENDING = """
ran early      jobs that did not find their order, which was committed later: the worker was faster than the commit
for no order   jobs whose order was rolled back, or died with the application; a job that does not look does harm
w/o receipt    orders that stayed without: their job ran early, gave up, or was never enqueued
"""


def row(title: str, outcome: Outcome) -> str:
    figures = (outcome.orders, outcome.jobs, outcome.too_early, outcome.for_nothing, outcome.lost, outcome.twice)
    widths = (13, 10, 9, 9, 11, 10)
    return f"{title:<26}" + "".join(f"{figure:>{width},}" for figure, width in zip(figures, widths, strict=True))


def main() -> None:
    print(__doc__, flush=True)
    print(HEAD.strip("\n"), flush=True)
    with contextlib.ExitStack() as servers:
        postgres = servers.enter_context(PostgresServer(postgres_bindir(18))).start()
        broker = servers.enter_context(TansuBroker()).start()
        for name, (title, kind) in WAYS.items():
            with contextlib.ExitStack() as parts:
                print(row(title, kind(postgres, broker, name, parts).play()), flush=True)
    print(ENDING, end="", flush=True)


if __name__ == "__main__":
    main()
