"""A backlog, drained in turn by `pg_recvlogical`, the floor and the relay, each from a slot of its own at one place."""

import sys
from dataclasses import dataclass
from statistics import median

from benchmarks.backlog import Shape, load
from benchmarks.rig import Rig
from benchmarks.topic import Contents, check_topic
from benchmarks.usage import Usage, measure
from tests.fix_command import EXECUTABLE
from tests.fix_postgres import Database


@dataclass(frozen=True, slots=True)
class Drain:
    shape: Shape
    pg_recvlogical: list[Usage]
    relay: list[Usage]
    topics: list[Contents]
    floor: list[Usage]
    """Of `benchmarks.floor`, where it was asked for."""

    @property
    def yardstick_rows_per_second(self) -> float:
        """From the start of streaming to the exit, as all rates here."""
        return self.shape.rows / median(usage.streaming_seconds for usage in self.pg_recvlogical)

    @property
    def rows_per_second(self) -> float:
        return self.shape.rows / median(usage.streaming_seconds for usage in self.relay)

    @property
    def ratio(self) -> float:
        return self.rows_per_second / self.yardstick_rows_per_second

    @property
    def floor_ratio(self) -> float:
        rows_per_second = self.shape.rows / median(usage.streaming_seconds for usage in self.floor)
        return rows_per_second / self.yardstick_rows_per_second

    @property
    def floor_cpu_seconds_per_million(self) -> float:
        return median(usage.cpu_seconds for usage in self.floor) / self.shape.rows * 1e6

    @property
    def whole_ratio(self) -> float:
        """With the start of both processes: the relay's is Python's, about half a second."""
        return median(usage.seconds for usage in self.pg_recvlogical) / median(usage.seconds for usage in self.relay)

    @property
    def cpu_seconds_per_million(self) -> float:
        """Of the whole process, its start included."""
        return median(usage.cpu_seconds for usage in self.relay) / self.shape.rows * 1e6

    @property
    def streaming_cpu_seconds_per_million(self) -> float:
        return median(usage.streaming_cpu_seconds for usage in self.relay) / self.shape.rows * 1e6

    @property
    def peak_rss_bytes(self) -> int:
        return max(usage.peak_rss_bytes for usage in self.relay)

    @property
    def rss_growth_bytes(self) -> int:
        return max(usage.rss_growth_bytes for usage in self.relay)

    @property
    def void(self) -> bool:
        return any(contents.void for contents in self.topics)


def drain(rig: Rig, shape: Shape, runs: int, *, floor: bool = False) -> Drain:
    found = Drain(shape, [], [], [], [])
    with rig.database() as database:
        for run in range(runs):
            rig.cdc_outbox("init-slot", "--dsn", database.socket_dsn, "--slot", _relay_slot(database, run))
            for slot in (_yardstick_slot(database, run), *([_floor_slot(database, run)] if floor else [])):
                database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
        end = load(database, shape)
        for run in range(runs):
            found.pg_recvlogical.append(_receive(rig, database, _yardstick_slot(database, run), end))
            if floor:
                with rig.topic() as topic:
                    found.floor.append(_floor_once(rig, database, _floor_slot(database, run), topic, end))
            with rig.topic() as topic:
                found.relay.append(drain_once(rig, database, _relay_slot(database, run), topic))
                found.topics.append(check_topic(rig.broker.bootstrap, topic, shape.rows))
    return found


def _relay_slot(database: Database, run: int) -> str:
    return f"{database.name}_relay_{run}"


def _yardstick_slot(database: Database, run: int) -> str:
    return f"{database.name}_recvlogical_{run}"


def _floor_slot(database: Database, run: int) -> str:
    return f"{database.name}_floor_{run}"


def _receive(rig: Rig, database: Database, slot: str, end: str) -> Usage:
    args = ["--start", "-v", "-f", "/dev/null", "-d", database.socket_dsn, "--slot", slot, "--endpos", end]
    args += ["-o", "proto_version=1", "-o", "publication_names=cdc_outbox"]
    usage = measure([rig.postgres.bindir / "pg_recvlogical", *args], b"streaming initiated")
    _drop(database, slot)
    return usage


def _floor_once(rig: Rig, database: Database, slot: str, topic: str, end: str) -> Usage:
    args = ["-m", "benchmarks.floor", database.socket_dsn, slot, topic, rig.broker.bootstrap, end]
    usage = measure([sys.executable, *args], b"streaming ")
    _drop(database, slot)
    return usage


def drain_once(rig: Rig, database: Database, slot: str, topic: str, purge_every: str = "off") -> Usage:
    args = ["stream", "--dsn", database.socket_dsn, "--slot", slot, "--topic", topic]
    args += ["--bootstrap-servers", rig.broker.bootstrap, "--until-caught-up"]
    args += ["--purge-every", purge_every, "--metrics-address", "off"]
    usage = measure([EXECUTABLE, *args], b"streaming ")
    _drop(database, slot)
    return usage


def _drop(database: Database, slot: str) -> None:
    """It would hold WAL back."""
    database.execute("select pg_drop_replication_slot(%s)", (slot,))
