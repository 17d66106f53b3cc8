"""A relay under test: its database, topic and slot, the installed command around them, and the standard check.

A row of a test is a (task, n): `n` counts up per task and stands in `args`, so that every record says which row it
is and in what order the rows of its task were committed.
"""

import contextlib
import itertools
import json
import random
import re
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import psycopg
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]  # not in its __all__

from cdc_outbox.lsn import parse_lsn
from tests.fix_command import Command, Running, get, scrape
from tests.fix_kafka import Broker, CreateTopic, Record
from tests.fix_postgres import Database
from tests.waiting import eventually

Row = tuple[str, int]
LATEST = OffsetSpec.latest()  # type: ignore[no-untyped-call]
INSERT = """
insert into outbox (task, args)
select %s, jsonb_build_object('n', n) || %s::jsonb from unnest(%s::int[]) with ordinality t (n, place)
order by place"""


@dataclass(frozen=True, slots=True)
class Death:
    """What stood where when a relay had just been killed."""

    confirmed_flush_lsn: int
    ends: dict[int, int]  # partition -> end offset


class RelayRig:
    """One outbox, one topic, and as many relays as the test starts."""

    def __init__(self, database: Database, broker: Broker, command: Command, topic: str) -> None:
        self.database = database
        self.broker = broker
        self.command = command
        self.topic = topic
        self.slot = self.publication = database.name  # slots are cluster-wide, and so are the databases' names
        self._counters: dict[str, Iterator[int]] = defaultdict(itertools.count)

    # -- the command --------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        return ["--dsn", self.database.dsn, "--slot", self.slot, "--publication", self.publication]

    @property
    def stream_options(self) -> list[str]:
        """The metrics' port is in the log; purging is what a test asks for."""
        options = ["--bootstrap-servers", self.broker.bootstrap, "--topic", self.topic]
        return [*self.names, *options, "--metrics-address", "127.0.0.1:0", "--purge-every", "off"]

    def init(self, *options: object) -> None:
        done = self.command.run("init-slot", *self.names, *options)
        assert done.returncode == 0, done.stderr

    def stream(self, *options: object) -> Running:
        """A relay that holds the slot by now. Later options win."""
        relay = self.start(*options)
        relay.wait_for_log("streaming ")
        return relay

    def start(self, *options: object) -> Running:
        return self.command.start("stream", *self.stream_options, *options)

    def catch_up(self, *options: object) -> str:
        """Relay everything committed so far; the log."""
        done = self.command.run("stream", *self.stream_options, "--until-caught-up", *options)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def purge(self, *options: object) -> str:
        done = self.command.run("purge", *self.names, *options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    # -- rows ---------------------------------------------------------------------------------------------------

    def next_rows(self, task: str, count: int) -> list[Row]:
        return [(task, next(self._counters[task])) for _ in range(count)]

    def stage(
        self,
        task: str = "mail",
        count: int = 1,
        *,
        on: psycopg.Connection[Any] | None = None,
        padding: int = 0,
    ) -> list[Row]:
        """Insert the next `count` rows of `task` in one statement; on `on`, or committed at once. `padding` makes
        each that much larger, with bytes that no compression takes back."""
        rows = self.next_rows(task, count)
        more = {"padding": secrets.token_hex(padding)[:padding]} if padding else {}
        parameters = (task, json.dumps(more), [n for _, n in rows])
        if on is None:
            self.database.execute(INSERT, parameters)
        else:
            on.execute(INSERT, parameters)
        return rows

    @property
    def backlog(self) -> int:
        """Rows that other sessions see in the table."""
        return int(self.database.fetch_value("select count(*) from outbox"))

    @property
    def wal_position(self) -> int:
        return parse_lsn(self.database.fetch_value("select pg_current_wal_insert_lsn()::text"))

    # -- the slot and the topic ---------------------------------------------------------------------------------

    @property
    def confirmed(self) -> int:
        query = "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s"
        return parse_lsn(self.database.fetch_value(query, (self.slot,)))

    def wait_until_confirmed(self, position: int, deadline: float = 20) -> None:
        eventually(lambda: self.confirmed >= position, deadline, "the slot is confirmed that far")

    def ends(self) -> dict[int, int]:
        """Partition -> end offset."""
        admin = self.broker.admin
        partitions = admin.list_topics(self.topic, timeout=10).topics[self.topic].partitions
        asked = {TopicPartition(self.topic, partition): LATEST for partition in partitions}
        found = admin.list_offsets(asked, request_timeout=10)
        return {partition.partition: future.result(10).offset for partition, future in found.items()}

    def read(self, *, until: Callable[[list[Record]], object] | None = None, deadline: float = 30) -> list[Record]:
        return self.broker.read(self.topic, until=until, deadline=deadline)

    def wait_for(self, rows: Iterable[Row], deadline: float = 30) -> list[Record]:
        """The topic, once every one of `rows` is there."""
        wanted = set(rows)
        return self.read(until=lambda records: wanted <= set(rows_of(records)), deadline=deadline)

    # -- the standard check -------------------------------------------------------------------------------------

    def death(self) -> Death:
        """After a `kill9`, once Postgres has noticed it too."""
        query = "select active_pid is null from pg_replication_slots where slot_name = %s"
        eventually(lambda: self.database.fetch_value(query, (self.slot,)), 20, "the slot is free")
        return Death(self.confirmed, self.ends())


def rows_of(records: Iterable[Record]) -> list[Row]:
    return [row_of(record) for record in records]


def row_of(record: Record) -> Row:
    task, value = record.headers["task"], record.value
    assert task is not None
    assert value is not None
    return task.decode(), json.loads(value)["n"]


def standard_check(committed: Sequence[Row], rolled_back: Iterable[Row], records: Iterable[Record]) -> int:
    """STD 1 to 3, with `committed` in commit order per task. Returns how many records were repeats.

    1. every committed row at least once; 2. no row that was rolled back; 3. per task, first occurrences in commit
    order, and any repeat is a contiguous replay from an earlier point. For (3) the records of a task must follow each
    other in one partition, each going on by one row or going back.
    """
    in_order = sorted(records, key=lambda record: (record.partition, record.offset))
    received = rows_of(in_order)
    missing = set(committed) - set(received)
    assert not missing, f"{len(missing)} committed rows are missing, {sorted(missing)[:5]} among them"
    undone = set(rolled_back) & set(received)
    assert not undone, f"{len(undone)} rolled-back rows arrived, {sorted(undone)[:5]} among them"
    unknown = set(received) - set(committed)
    assert not unknown, f"{len(unknown)} rows arrived that nobody committed, {sorted(unknown)[:5]} among them"
    places: dict[Row, int] = {}
    for _, rows in itertools.groupby(sorted(committed, key=lambda row: row[0]), key=lambda row: row[0]):
        places |= {row: place for place, row in enumerate(rows)}
    last: dict[str, int] = defaultdict(lambda: -1)
    homes: dict[str, int] = {}
    for record, row in zip(in_order, received, strict=True):
        task, place = row[0], places[row]
        home = homes.setdefault(task, record.partition)
        assert record.partition == home, f"task {task} is in partitions {home} and {record.partition}"
        assert place <= last[task] + 1, f"row {place} of task {task} came after row {last[task]}"
        last[task] = place
    return len(received) - len(set(received))


def check_deaths(deaths: Iterable[Death], records: Iterable[Record]) -> None:
    """STD 4: whenever the relay was killed, confirmed_flush_lsn <= the commit LSN of the oldest transaction not
    fully acknowledged. What was not in the topic by then had not been acknowledged; when it arrives later, its
    header says where its transaction committed."""
    first: dict[Row, Record] = {}
    for record in sorted(records, key=lambda record: (record.partition, record.offset)):
        first.setdefault(row_of(record), record)
    for death in deaths:
        for row, record in first.items():
            if record.offset >= death.ends[record.partition]:
                commit = commit_lsn(record)
                assert death.confirmed_flush_lsn <= commit, f"{row} was confirmed and not delivered"


def commit_lsn(record: Record) -> int:
    return parse_lsn((record.headers["commit_lsn"] or b"").decode())


def metrics_url(relay: Running) -> str:
    relay.wait_for_log("metrics on port ")
    found = re.search(r"metrics on port (\d+)", relay.stderr_text())
    assert found
    return f"http://127.0.0.1:{found[1]}"


def metric(relay: Running, name: str) -> float:
    """The sum of a metric's samples, whatever their labels."""
    samples = scrape(f"{metrics_url(relay)}/metrics")
    found = [value for sample, value in samples.items() if sample.partition("{")[0] == name]
    assert found, f"no metric {name}"
    return sum(found)


def readiness(relay: Running) -> tuple[int, str]:
    return get(f"{metrics_url(relay)}/readyz")


class Load:
    """Writers with a task each, which commit, roll back and roll back to savepoints at random, until the end."""

    TASKS: tuple[str, ...] = ("mail", "invoice.pdf", "größe", "re index")
    PAUSE_SECONDS = 0.012

    def __init__(self, rig: RelayRig, seed: int) -> None:
        self.committed: list[Row] = []
        self.rolled_back: list[Row] = []
        self._rig = rig
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._write, args=(task, random.Random(f"{seed} {task}"))) for task in self.TASKS
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _write(self, task: str, choice: random.Random) -> None:
        try:
            with psycopg.connect(self._rig.database.socket_dsn) as connection:
                while not self._stop.wait(self.PAUSE_SECONDS):
                    kept, undone = self._transaction(connection, task, choice)
                    # list.extend is atomic, and a task belongs to one thread: its rows stay in commit order.
                    self.committed.extend(kept)
                    self.rolled_back.extend(undone)
        except BaseException as failure:
            self._failures.append(failure)

    def _transaction(
        self, connection: psycopg.Connection[Any], task: str, choice: random.Random
    ) -> tuple[list[Row], list[Row]]:
        def stage() -> list[Row]:
            return self._rig.stage(task, choice.randint(1, 6), on=connection)

        kept, undone = stage(), []
        end = choice.random()
        if end < 0.15:
            with contextlib.suppress(psycopg.Rollback), connection.transaction():
                undone = stage()
                raise psycopg.Rollback
            kept += stage()
        if end > 0.85:
            connection.rollback()
            return [], kept + undone
        connection.commit()
        return kept, undone


@pytest.fixture
def rig(database: Database, broker: Broker, command: Command, topic: CreateTopic) -> RelayRig:
    """On the session's servers, with `init-slot` done and a topic of one partition."""
    rig = RelayRig(database, broker, command, topic())
    rig.init()
    return rig
