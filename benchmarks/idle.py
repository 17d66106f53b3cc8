"""What a relay with nothing to do costs: CPU, and transactions in its database."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import psycopg

from benchmarks.backlog import Shape, load
from benchmarks.rig import Rig
from benchmarks.usage import RunFailed, cpu_seconds, peak_rss_bytes

ROWS = 100
CHECK_EVERY = "5s"
"""Not the default of a minute: the checks that rows ask for are over sooner, and one too many shows more often."""
SETTLED_SECONDS = 12.0
"""A backend that falls idle reports its counts within 10 s (manual, 27.2.1)."""
LONGEST_SETTLING_SECONDS = 120.0

_TRANSACTIONS = "select xact_commit + xact_rollback from pg_stat_database where datname = %s"


@dataclass(frozen=True, slots=True)
class Idle:
    seconds: float
    cpu_seconds: float
    transactions: int
    peak_rss_bytes: int


def idle(rig: Rig, seconds: float) -> Idle:
    """After some rows were relayed and purged. The observer is in another database, so it does not count itself."""
    with (
        rig.database() as database,
        rig.topic() as topic,
        rig.relay(database, topic, "--check-every", CHECK_EVERY) as relay,
        psycopg.connect(rig.postgres.socket_dsn(), autocommit=True) as observer,
    ):

        def transactions() -> int:
            return int(observer.execute(_TRANSACTIONS, (database.name,)).fetchall()[0][0])

        load(database, Shape(ROWS, 1))
        before = _settled(transactions)
        cpu, started = cpu_seconds(relay.pid), time.monotonic()
        time.sleep(seconds)
        spent = cpu_seconds(relay.pid) - cpu
        elapsed = time.monotonic() - started
        time.sleep(SETTLED_SECONDS)  # what happened last is reported by now
        return Idle(elapsed, spent, transactions() - before, peak_rss_bytes(relay.pid))


def _settled(transactions: Callable[[], int]) -> int:
    deadline = time.monotonic() + LONGEST_SETTLING_SECONDS
    before, now = -1, transactions()
    while now != before:
        if time.monotonic() > deadline:
            raise RunFailed(f"still {now} transactions and counting after {LONGEST_SETTLING_SECONDS:.0f} s")
        time.sleep(SETTLED_SECONDS)  # the measurement is that nothing happens
        before, now = now, transactions()
    return now
