"""PostgreSQL 18 over a Unix socket, a broker beside it, and the installed command: the parts of the tests."""

import contextlib
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from confluent_kafka import Producer

from benchmarks.usage import RunFailed
from cdc_outbox.embedded import PostgresServer, TansuBroker, postgres_bindir
from cdc_outbox.kafka import DEFAULTS
from tests.fix_command import Command, Running
from tests.fix_kafka import Broker
from tests.fix_postgres import Database
from tests.kafka_server import KafkaServer, silent

MAJOR = 18
PARTITIONS = 4
WARM_UP_RECORDS = 1_000_000

POSTGRES_SETTINGS = {
    # Neither may run into a measurement; and autovacuum's transactions would count as the relay's.
    "autovacuum": "off",
    "checkpoint_timeout": "1h",
    "max_wal_size": "16GB",
}
KAFKA_SETTINGS = {"log.segment.delete.delay.ms": 500}  # a topic that is deleted frees its disk at once


@dataclass(frozen=True, slots=True)
class Rig:
    postgres: PostgresServer
    broker: Broker
    command: Command

    @contextlib.contextmanager
    def database(self) -> Iterator[Database]:
        """A fresh one. Nothing of it counts for another's `pg_stat_database`."""
        database = Database(self.postgres, f"bench_{secrets.token_hex(4)}")
        database.create()
        try:
            yield database
        finally:
            database.drop()

    @contextlib.contextmanager
    def topic(self) -> Iterator[str]:
        name = self.broker.create_topic(partitions=PARTITIONS)
        try:
            yield name
        finally:
            self.broker.delete_topic(name)

    def cdc_outbox(self, *args: object) -> None:
        """Raises RunFailed."""
        done = self.command.run(*args)
        if done.returncode:
            raise RunFailed(f"cdc-outbox {args[0]}: exit {done.returncode}: {done.stderr.strip()}")

    @contextlib.contextmanager
    def relay(self, database: Database, topic: str, *more: object) -> Iterator[Running]:
        """`stream` with its defaults and `more`, streaming; metrics on a port that is free."""
        dsn = database.socket_dsn
        self.cdc_outbox("init-slot", "--dsn", dsn)
        running = self.command.start(
            *("stream", "--dsn", dsn, "--bootstrap-servers", self.broker.bootstrap),
            *("--topic", topic, "--metrics-address", "127.0.0.1:0", *more),
        )
        running.wait_for_log("streaming ")
        yield running
        if code := running.terminate():
            raise RunFailed(f"cdc-outbox stream: exit {code}: {running.stderr_text()}")


@contextlib.contextmanager
def rig(kind: Literal["kafka", "tansu"], **settings: object) -> Iterator[Rig]:
    """`settings` of Postgres, over those above."""
    with ExitStack() as stack:
        server = PostgresServer(postgres_bindir(MAJOR), fsync=True, settings={**POSTGRES_SETTINGS, **settings})
        postgres = stack.enter_context(server).start()
        node: KafkaServer | TansuBroker
        node = KafkaServer(settings=KAFKA_SETTINGS) if kind == "kafka" else TansuBroker()
        stack.callback(node.close)
        node.start()
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        parts = Rig(postgres, Broker(kind, node.bootstrap, node), Command(directory, stack))
        if kind == "kafka":
            with parts.topic() as topic:
                _warm_up(node.bootstrap, topic)
        yield parts


def _warm_up(bootstrap: str, topic: str) -> None:
    """A Java process just started is slow for some seconds; whoever comes first would pay for it."""
    producer = Producer({**DEFAULTS, "bootstrap.servers": bootstrap}, logger=silent)
    for number in range(WARM_UP_RECORDS):
        producer.produce(topic, b"%0200d" % number, headers=[("id", b"%d" % number)])
        while len(producer) > 10_000:
            producer.poll(0.05)
    producer.flush(60)
