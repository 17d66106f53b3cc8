"""From just before COMMIT is sent to the consumer, at a steady rate, with the relay's defaults.

Each transaction has its instant in a schedule made in advance: one that is slow makes the next ones late, which is
reported, not fewer. Writers are a process of their own, so that they and the consumer do not wait for one
interpreter; CLOCK_MONOTONIC is the same for both.
"""

import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import psycopg
from confluent_kafka import Consumer

from benchmarks.backlog import INSERT
from benchmarks.rig import Rig
from benchmarks.topic import row_id, subscribe
from benchmarks.usage import peak_rss_bytes

WRITERS = 4
HEAD_START_SECONDS = 2.0
PATIENCE_SECONDS = 15.0
LATEST_MS = 100.0
"""Writers further behind than this did not make the rate: the machine is too busy to measure it."""

Commits = dict[int, tuple[float, float]]
"""id → (instant in the schedule, just before COMMIT was sent), by time.monotonic()."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds. `late`: how far behind the schedule COMMIT was sent."""

    transactions_per_second: int
    transactions: int
    missing: int
    repeated: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    late_p99_ms: float
    peak_rss_bytes: int

    @property
    def on_schedule(self) -> bool:
        return self.late_p99_ms <= LATEST_MS

    @property
    def void(self) -> bool:
        return bool(self.missing or self.repeated)


def latency(rig: Rig, transactions_per_second: int, seconds: float) -> Latency:
    count = int(transactions_per_second * seconds)
    with (
        rig.database() as database,
        rig.topic() as topic,
        rig.relay(database, topic) as relay,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
    ):
        consumer = subscribe(rig.broker.bootstrap, topic)
        start = time.monotonic() + HEAD_START_SECONDS
        writing = pool.submit(write, database.socket_dsn, start, transactions_per_second, count)
        arrivals = _consume(consumer, count, writing)
        commits = writing.result()
        peak = peak_rss_bytes(relay.pid)
    delays = sorted(arrivals[0][row] - sent for row, (_, sent) in commits.items() if row in arrivals[0])
    late = sorted(sent - planned for planned, sent in commits.values())
    return Latency(
        transactions_per_second,
        count,
        missing=count - len(delays),
        repeated=arrivals[1] - len(arrivals[0]),
        p50_ms=_quantile(delays, 0.5),
        p99_ms=_quantile(delays, 0.99),
        max_ms=_quantile(delays, 1),
        late_p99_ms=_quantile(late, 0.99),
        peak_rss_bytes=peak,
    )


def _quantile(sorted_seconds: list[float], share: float) -> float:
    if not sorted_seconds:
        return float("inf")
    return 1000 * sorted_seconds[min(len(sorted_seconds) - 1, int(share * len(sorted_seconds)))]


def _consume(consumer: Consumer, count: int, writing: "Future[Commits]") -> tuple[dict[int, float], int]:
    """First arrival of each id, and how many records came."""
    first: dict[int, float] = {}
    records = 0
    heard = time.monotonic()
    try:
        while len(first) < count and (not writing.done() or time.monotonic() - heard < PATIENCE_SECONDS):
            message = consumer.poll(0.1)
            if message is not None:
                heard = time.monotonic()
                records += 1
                first.setdefault(row_id(message), heard)
    finally:
        consumer.close()
    return first, records


def write(dsn: str, start: float, transactions_per_second: int, count: int) -> Commits:
    """Runs in a process of its own. Transaction n is due at start + n / rate; each writer takes every fourth."""
    commits: Commits = {}
    schedule = [start + number / transactions_per_second for number in range(count)]
    with ThreadPoolExecutor(WRITERS) as pool:
        for written in pool.map(_write, [dsn] * WRITERS, (schedule[writer::WRITERS] for writer in range(WRITERS))):
            commits |= written
    return commits


def _write(dsn: str, schedule: list[float]) -> Commits:
    commits: Commits = {}
    with psycopg.connect(dsn) as connection:
        for number, planned in enumerate(schedule):
            time.sleep(max(0.0, planned - time.monotonic()))  # nothing to wait for but the time itself
            row = connection.execute(INSERT, (number,)).fetchall()[0][0]
            sent = time.monotonic()
            connection.commit()
            commits[row] = (planned, sent)
    return commits
