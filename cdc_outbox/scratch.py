"""What `verify` works with: scratch objects under one random name, which are removed whatever happens.

    application (psycopg) -> outbox -> `cdc-outbox stream`, a process -> topic -> worker (confluent-kafka)

Slot, schema, publication, topic and every session bear that name, so that what a killed verify left can be found.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as Overdue
from pathlib import Path

import psycopg
from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cdc_outbox.config import Settings
from cdc_outbox.conninfo import complete_conninfo
from cdc_outbox.errors import DeliveryFailed, PreconditionError, from_sqlstate
from cdc_outbox.kafka_topic import Cluster
from cdc_outbox.scratch_process import CommandProcess
from cdc_outbox.scratch_worker import KAFKA_SECONDS, Worker
from cdc_outbox.statements import statements

log = logging.getLogger("cdc_outbox.verify")

Database = psycopg.Connection[tuple[object, ...]]

OURS = ("CDC_OUTBOX_", "DATABASE_URL", "KAFKA_BOOTSTRAP_SERVERS")  # the relays get a configuration file instead
REMOVE_SECONDS = 15.0
_SILENT = logging.Logger("librdkafka")  # what is wrong comes as an error, too
_SILENT.addHandler(logging.NullHandler())

TABLES = """
create table visible (n bigint generated always as identity primary key);
create table effects (id text not null);
"""
STAGE = """
insert into outbox (task, args) select %s, jsonb_build_object('n', n) from generate_series(1, %s) n
returning id::text"""


class Scratch:
    """Made by `scratch`."""

    def __init__(self, settings: Settings, topic: str | None, stack: contextlib.ExitStack) -> None:
        self.name = f"cdc_outbox_verify_{secrets.token_hex(4)}"
        self._stack = stack
        self._settings = settings
        self._conninfo = complete_conninfo(settings.dsn)
        self.topic = topic or self.name
        self._topic_is_ours = topic is None
        self.processes: list[CommandProcess] = []
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        self._environment = {**kept, "PYTHONUNBUFFERED": "1"}

    def make(self) -> None:
        """Raises PreconditionError, ConfigError."""
        with self.translated("connecting to Postgres"):
            self.connect(set_up=False).close()
        admin = self._cluster()
        self._directory = Path(tempfile.mkdtemp(prefix="cdc-outbox-verify-"))
        self._stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
        (self._directory / "config.toml").write_text(self._config(), encoding="utf-8")
        self._make_topic(admin)
        self.worker = self._new_worker()
        self._stack.callback(self._remove)
        try:
            with self.translated("making scratch objects"), self.connect(set_up=False) as db:
                db.execute(sql.SQL("create schema {}").format(sql.Identifier(self.name)))
                db.execute(sql.SQL("set search_path = {}").format(sql.Identifier(self.name)))
                db.execute(TABLES)
                names = {"schema": self.name, "inbox": "inbox", "inbox_done_at": "inbox_done_at"}
                for statement in statements("inbox.sql", names):
                    db.execute(statement.encode())
        except PreconditionError as error:
            raise PreconditionError(
                str(error), "verify needs a role that may create a schema, a publication and a slot in this database"
            ) from None
        self._stack.callback(self.kill)
        made = self.start("init-slot", "--wait", "30s")
        made.wait(40)
        if made.exit_code != 0:
            made.raise_failure("did not end")

    def _config(self) -> str:
        """Secrets stand here, in a folder that nobody else can enter, and in no command line."""
        values = {
            "dsn": make_conninfo(self._conninfo, application_name=self.name),
            "bootstrap-servers": self._settings.bootstrap_servers,
            "topic": self.topic,
            "table": f"{self.name}.outbox",
            "slot": self.name,
            "publication": self.name,
        }
        properties = {"linger.ms": "0", **self._settings.properties}
        lines = [f"{name} = {_toml(value)}" for name, value in values.items()]
        return "\n".join([*lines, "[property]", *(f"{_toml(n)} = {_toml(v)}" for n, v in properties.items()), ""])

    # -- Kafka --------------------------------------------------------------------------------------------------

    def _cluster(self) -> AdminClient:
        servers, properties = self._settings.bootstrap_servers, self._settings.properties
        cluster = Cluster(servers, properties)
        try:
            cluster.brokers()
        except DeliveryFailed as error:
            raise PreconditionError(f"Kafka: {error}", "name brokers that answer with --bootstrap-servers") from None
        if not self._topic_is_ours and cluster.topic(self.topic) is None:
            raise PreconditionError(f"topic {self.topic} does not exist", "create it, or omit the option")
        return AdminClient({**properties, "bootstrap.servers": servers}, logger=_SILENT)

    def _make_topic(self, admin: AdminClient) -> None:
        if not self._topic_is_ours:
            return
        self._stack.callback(self._delete_topic, admin)
        try:
            admin.create_topics([NewTopic(self.topic, 1, -1)])[self.topic].result(KAFKA_SECONDS)
        except (KafkaException, Overdue) as error:
            raise PreconditionError(
                f"creating topic {self.topic}: {_words(error)}", "name one that exists with --scratch-topic"
            ) from None

    def _delete_topic(self, admin: AdminClient) -> None:
        try:
            admin.delete_topics([self.topic])[self.topic].result(KAFKA_SECONDS)
        except (KafkaException, Overdue) as error:
            missing = isinstance(error, KafkaException) and error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART
            if not missing:
                log.error("topic %s could not be removed: %s", self.topic, _words(error))

    def _new_worker(self) -> Worker:
        own = {"bootstrap.servers": self._settings.bootstrap_servers, "group.id": self.name}
        own |= {"enable.auto.commit": "false", "fetch.wait.max.ms": "5"}
        consumer = Consumer({**self._settings.properties, **own}, logger=_SILENT)
        self._stack.callback(consumer.close)
        try:
            return Worker(consumer, self.topic, ours=self._topic_is_ours, run=self.name)
        except KafkaException as error:
            raise PreconditionError(f"reading topic {self.topic}: {_words(error)}") from None

    # -- Postgres -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise from_sqlstate(error.sqlstate, error.diag.message_primary or str(error), doing) from None

    def connect(self, *, autocommit: bool = True, set_up: bool = True) -> Database:
        """An application's session. It waits for no synchronous standby, unless it says so."""
        conninfo = make_conninfo(self._conninfo, application_name=f"{self.name}_client")
        connection: Database = psycopg.connect(conninfo, autocommit=True)
        self._stack.callback(connection.close)
        connection.execute("set synchronous_commit = local")
        if set_up:
            connection.execute(sql.SQL("set search_path = {}").format(sql.Identifier(self.name)))
        connection.autocommit = autocommit
        return connection

    def stage(self, db: Database, gate: str, count: int = 1) -> list[str]:
        """Insert jobs in the transaction of `db`; their ids."""
        return [str(row[0]) for row in db.execute(STAGE, [self.task(gate), count]).fetchall()]

    def task(self, gate: str) -> str:
        return f"{self.name}.{gate}"

    def _remove(self) -> None:
        """Slot first: it holds WAL back."""
        try:
            with self.connect(set_up=False) as db:
                db.execute("set client_min_messages = warning")
                self._drop_slot(db)
                db.execute(sql.SQL("drop publication if exists {}").format(sql.Identifier(self.name)))
                db.execute(sql.SQL("drop schema if exists {} cascade").format(sql.Identifier(self.name)))
        except (psycopg.Error, TimeoutError) as error:
            log.error(
                "slot, publication and schema %s could not all be removed: %s", self.name, str(error).splitlines()[0]
            )

    def _drop_slot(self, db: Database) -> None:
        deadline = time.monotonic() + REMOVE_SECONDS
        ours = "select pg_terminate_backend(pid) from pg_stat_activity where starts_with(application_name, %s)"
        while True:
            # Also a backend that still waits to make the slot.
            left = db.execute(f"{ours} and pid <> pg_backend_pid()".encode(), [self.name]).fetchall()
            drop = "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = %s"
            with contextlib.suppress(psycopg.errors.ObjectInUse, psycopg.errors.UndefinedObject):
                db.execute(drop, [self.name])
                if not left:
                    return
            if time.monotonic() > deadline:
                raise TimeoutError("the slot is in use")
            time.sleep(0.05)  # nothing to wait on: a backend ends

    # -- the command --------------------------------------------------------------------------------------------

    def start(self, command: str, *options: str) -> CommandProcess:
        directory = self._directory / str(len(self.processes))
        directory.mkdir()
        arguments = [command, "--config", str(self._directory / "config.toml"), *options]
        process = CommandProcess(directory, arguments, self._environment)
        self.processes.append(process)
        return process

    def kill(self) -> None:
        for process in self.processes:
            if process.running:
                process.kill9()


@contextlib.contextmanager
def scratch(settings: Settings, topic: str | None) -> Iterator[Scratch]:
    """Everything there; everything gone afterwards. `topic`: one to use, or None for one of its own."""
    with contextlib.ExitStack() as stack:
        made = Scratch(settings, topic, stack)
        try:
            made.make()
            yield made
        finally:
            # From here on nothing may disturb the tidying up.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)


def _toml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _words(error: Exception) -> str:
    if isinstance(error, KafkaException):
        return str(error.args[0].str())
    return str(error) or "no answer"
