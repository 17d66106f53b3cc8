"""What the demo tells: the way of a job, each line checked before it is said; the first that fails ends the story.

    application -> users, outbox -> PostgreSQL -> `cdc-outbox stream` -> broker -> worker

The relay is the real command in a process of its own, so that it can be killed. Application and worker are here, and
as short as they can be: examples too.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from cdc_outbox.embedded import PostgresServer, ServerProcess, TansuBroker, free_port
from cdc_outbox.errors import OutboxError

Database = psycopg.Connection[tuple[object, ...]]

TOPIC = "outbox"
WATCH_SECONDS = 2.0
PATIENCE_SECONDS = 20.0
TRANSACTIONS, JOBS_EACH, STREAM_SECONDS = 600, 10, 6.0
KILL_AT = 1500  # jobs on the topic
COMMAND = (sys.executable, "-P", "-m", "cdc_outbox")  # -P: import nothing from the current folder
FOREIGN = ("CDC_OUTBOX_", "PG", "KAFKA_", "DATABASE_URL")  # what the user's shell may hold for servers of their own


def sign_up(db: Database, user: str, jobs: int = 1) -> list[int]:
    """The application: its own data, and the jobs that follow from it, in the transaction that is open."""
    db.execute("insert into users (name) values (%s)", [user])
    rows = db.execute(
        "insert into outbox (task, args) select 'send_mail', jsonb_build_object('user', %s::text, 'mail', mail)"
        " from generate_series(1, %s) mail returning id",
        [user, jobs],
    )
    return [int(str(row[0])) for row in rows]


class Worker:
    """Reads the topic from its beginning, and counts how often it saw each job."""

    def __init__(self, bootstrap: str) -> None:
        # This broker looks for new records only after that wait; Kafka answers as soon as it has one.
        properties = {"bootstrap.servers": bootstrap, "group.id": "demo", "fetch.wait.max.ms": 5}
        self._consumer = Consumer(properties, logger=logging.Logger("demo.silent"))
        # assign() and no subscribe(): one reader needs no group, and waits for none to form.
        self._consumer.assign([TopicPartition(TOPIC, 0, OFFSET_BEGINNING)])
        self.seen: Counter[int] = Counter()
        self.close = self._consumer.close

    def read_until(self, done: Callable[[], bool], seconds: float) -> bool:
        """False if it was not done in time."""
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                return False
            message = self._consumer.poll(0.05)
            if message is None:
                continue
            if error := message.error():
                raise OutboxError(f"reading the topic: {error.str()}")
            headers = dict(message.headers() or [])
            self.seen[int(headers["id"] or 0)] += 1  # the id that makes an effect happen once
        return True

    def read_for(self, seconds: float) -> None:
        self.read_until(lambda: False, seconds)


def write_jobs(dsn: str, stop: threading.Event, committed: list[int], rolled_back: list[int]) -> None:
    """The application under load, at an even pace; every tenth transaction fails."""
    start = time.monotonic()
    with psycopg.connect(dsn) as db:
        for number in range(TRANSACTIONS):
            due = start + number * STREAM_SECONDS / TRANSACTIONS
            if stop.wait(max(0.0, due - time.monotonic())):
                return
            jobs = sign_up(db, f"user {number}", JOBS_EACH)
            if number % 10:
                db.commit()
                committed += jobs
            else:
                db.rollback()
                rolled_back += jobs


class Relay(ServerProcess):
    """`cdc-outbox stream` in a process of its own."""

    name = "the relay"

    def start(self, environment: dict[str, str], *options: str) -> Relay:
        """Returns when it streams."""
        self.environment = environment
        self._spawn([*COMMAND, "stream", *options], environment, signal.SIGKILL)
        self._wait_ready(lambda: self.page("/readyz")[0] == 200, PATIENCE_SECONDS)
        return self

    def page(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.environment["CDC_OUTBOX_METRICS_ADDRESS"], timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        return 0, ""

    def purged(self) -> int:
        (line,) = (li for li in self.page("/metrics")[1].splitlines() if li.startswith("cdc_outbox_purged_rows_total"))
        return int(float(line.split()[-1]))


class Story:
    def __init__(
        self, postgres: PostgresServer, broker: TansuBroker, relay: Relay, clients: contextlib.ExitStack
    ) -> None:
        self.postgres, self.broker, self.relay, self._clients = postgres, broker, relay, clients
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)},
            "CDC_OUTBOX_DSN": postgres.dsn(),
            "CDC_OUTBOX_BOOTSTRAP_SERVERS": broker.bootstrap,
            "CDC_OUTBOX_METRICS_ADDRESS": f"127.0.0.1:{free_port()}",
        }
        self.committed: list[int] = []
        self.rolled_back: list[int] = []

    def play(self) -> None:
        self.set_up()
        self.commit_is_the_gate()
        self.rollback_leaves_nothing()
        self.killed_in_mid_stream()
        self.purge_empties_the_table()
        self.add_up()

    def set_up(self) -> None:
        admin = AdminClient({"bootstrap.servers": self.broker.bootstrap}, logger=logging.Logger("demo.silent"))
        admin.create_topics([NewTopic(TOPIC, 1, 1)])[TOPIC].result(PATIENCE_SECONDS)
        say("\n$ cdc-outbox init-slot")
        args = [*COMMAND, "init-slot"]
        made = subprocess.run(args, env=self.environment, capture_output=True, text=True, check=False)
        for line in made.stdout.splitlines():
            say(f"  {line}")
        check(made.returncode == 0, f"init-slot failed: {made.stderr.strip()}")
        say("$ cdc-outbox stream --purge-every off &")
        self.relay.start(self.environment, "--purge-every", "off")
        say(f"  streaming, pid {self.relay.pid}")
        self.db = self._clients.enter_context(psycopg.connect(self.postgres.dsn()))
        self.db.execute("create table users (id bigint generated always as identity primary key, name text)")
        self.db.commit()
        self.worker = Worker(self.broker.bootstrap)
        self._clients.callback(self.worker.close)

    def commit_is_the_gate(self) -> None:
        say("\n1. Nothing before the commit")
        jobs = sign_up(self.db, "ann")
        say("  begin; insert into users …; insert into outbox …;")
        self.worker.read_for(WATCH_SECONDS)
        check(not self.worker.seen, "a job reached the topic before its commit")
        say(f"  still open after {WATCH_SECONDS:g} s: nothing on the topic")
        milliseconds = self.commit(jobs)
        say(f"  commit; and the worker has the job, {milliseconds:.1f} ms later")
        with psycopg.connect(self.postgres.dsn()) as other:
            found = other.execute("select 1 from users where name = 'ann'").fetchone()
        check(found is not None, "a job arrived before its data was visible")
        say("  it looks for the user that the job is about: there")

    def rollback_leaves_nothing(self) -> None:
        say("\n2. Nothing after a rollback")
        self.rolled_back += sign_up(self.db, "bob")
        self.db.rollback()
        say("  begin; insert …; rollback;")
        jobs = sign_up(self.db, "cid")
        self.db.execute("savepoint here")
        self.rolled_back += sign_up(self.db, "dan")
        self.db.execute("rollback to savepoint here")
        say("  begin; insert …; savepoint …; insert …; rollback to savepoint …; commit;")
        milliseconds = self.commit(jobs)
        check(set(self.worker.seen) == set(self.committed), "a job that was rolled back reached the topic")
        say(f"  the one job that was committed arrived ({milliseconds:.1f} ms), the two others did not")

    def killed_in_mid_stream(self) -> None:
        rate = TRANSACTIONS * JOBS_EACH / STREAM_SECONDS
        say(f"\n3. kill -9 in mid-stream, with {rate:,.0f} jobs/s being written")
        before, stop_writing = len(self.worker.seen), threading.Event()
        committed: list[int] = []
        pool = self._clients.enter_context(ThreadPoolExecutor(1))
        self._clients.callback(stop_writing.set)
        writer = pool.submit(write_jobs, self.postgres.dsn(), stop_writing, committed, self.rolled_back)
        self.wait(lambda: len(self.worker.seen) - before >= KILL_AT or writer.done(), "some jobs on the topic")
        say(f"  kill -9 {self.relay.pid}")
        self.relay.kill9()
        self.worker.read_for(1.0)
        delivered, staged = len(self.worker.seen) - before, len(committed)
        check(0 < delivered < staged and not writer.done(), "the relay was not killed in mid-stream")
        say(f"  a second later: {staged:,} jobs committed, {delivered:,} delivered; the writer goes on")
        say("$ cdc-outbox stream --purge-every 2s &")
        self.relay.start(self.environment, "--purge-every", "2s")
        say(f"  streaming, pid {self.relay.pid}, from where the slot is")
        self.wait(writer.done, "the writer at its end")
        writer.result()
        self.committed += committed
        self.wait(self.all_delivered, "every committed job on the topic")
        say(f"  the writer is done: {len(committed):,} jobs committed, every one of them delivered")

    def purge_empties_the_table(self) -> None:
        say("\n4. The table empties by itself")
        say(f"  rows in the outbox now: {self.rows():,}")
        start = time.monotonic()
        self.wait(lambda: self.rows() == 0 and self.relay.purged() >= len(self.committed), "an empty outbox")
        say(f"  {time.monotonic() - start:.1f} s later: 0; the relay deletes what Kafka has acknowledged")
        self.worker.read_for(0.5)

    def add_up(self) -> None:
        seen, staged, purged = self.worker.seen, len(self.committed), self.relay.purged()
        delivered = sum(seen.values())
        check(self.lost() == 0, f"{self.lost()} jobs were lost")
        check(seen.keys() <= set(self.committed), "a job that was rolled back reached the topic")
        check(purged == staged, f"{purged} rows were purged, and {staged} staged")
        say()
        for name, figure, meaning in (
            ("staged", staged, "jobs committed with the data they belong to"),
            ("rolled back", len(self.rolled_back), "none of them was ever on the topic"),
            ("delivered", delivered, "records on the topic"),
            ("repeated", delivered - len(seen), "sent again after the kill; a worker knows them by id"),
            ("lost", self.lost(), ""),
            ("purged", purged, "rows deleted from the outbox, all of them delivered"),
        ):
            say(f"  {name:<12}{figure:>7,}  {meaning}".rstrip())

    def commit(self, jobs: list[int]) -> float:
        """Milliseconds from before the COMMIT is sent until the worker has the jobs."""
        start = time.monotonic()
        self.db.commit()
        self.committed += jobs
        self.wait(self.all_delivered, "a committed job on the topic")
        return (time.monotonic() - start) * 1000

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Reads the topic until then."""
        in_time = self.worker.read_until(lambda: done() or not self.relay.running, PATIENCE_SECONDS)
        check(self.relay.running, f"the relay ended: {self.relay.last_line()}")
        check(in_time, f"waited {PATIENCE_SECONDS:.0f} s in vain for {what}")

    def all_delivered(self) -> bool:
        return len(self.worker.seen) >= len(self.committed) and self.lost() == 0

    def lost(self) -> int:
        return len(set(self.committed) - self.worker.seen.keys())

    def rows(self) -> int:
        rows = self.db.execute("select count(*) from outbox").fetchall()
        self.db.commit()
        return int(str(rows[0][0]))


def say(line: str = "") -> None:
    print(line, flush=True)


def check(holds: bool, otherwise: str) -> None:
    """Raises OutboxError."""
    if not holds:
        raise OutboxError(otherwise)
