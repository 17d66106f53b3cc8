"""Ten times the backlog; a transaction as large as all of it; Kafka away meanwhile; and the first row after a start."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from statistics import median

from benchmarks.backlog import INSERT, Shape, load
from benchmarks.drain import Drain, drain
from benchmarks.rig import Rig
from benchmarks.topic import row_id, subscribe
from benchmarks.usage import RunFailed, environment, peak_rss_bytes
from tests.fix_command import EXECUTABLE

AWAY_SECONDS = 30.0
"""The queue is full after the first one or two."""
STARTS = 5
PATIENCE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Scale:
    base: Drain
    ten_times: Drain
    one_transaction: Drain
    kafka_away_rss_bytes: int
    """The peak with ten times the rows waiting."""
    first_row_seconds: float
    """From the start of the process to the consumer; a median."""

    @property
    def rate_at_ten_times(self) -> float:
        return self.ten_times.rows_per_second / self.base.rows_per_second


def scale(rig: Rig, rows: int) -> Scale:
    return Scale(
        base=drain(rig, Shape(rows, 100), 1),
        ten_times=drain(rig, Shape(10 * rows, 100), 1),
        one_transaction=drain(rig, Shape(10 * rows, 10 * rows), 1),
        kafka_away_rss_bytes=_kafka_away(rig, 10 * rows),
        first_row_seconds=median(_first_row(rig) for _ in range(STARTS)),
    )


def _kafka_away(rig: Rig, rows: int) -> int:
    """Frozen under a relay that streams: one that has not met Kafka would not even fill its queue."""
    with rig.database() as database, rig.topic() as topic, rig.relay(database, topic) as relay:
        rig.broker.kafka.pause()
        try:
            load(database, Shape(rows, 100))
            time.sleep(AWAY_SECONDS)
            if not relay.running:
                raise RunFailed(f"cdc-outbox stream ended while Kafka was away: {relay.stderr_text()}")
            return peak_rss_bytes(relay.pid)
        finally:
            rig.broker.kafka.resume()


def _first_row(rig: Rig) -> float:
    """A row waits; the relay is started."""
    with rig.database() as database, rig.topic() as topic:
        rig.cdc_outbox("init-slot", "--dsn", database.socket_dsn)
        database.execute(INSERT, (1,))
        consumer = subscribe(rig.broker.bootstrap, topic)
        consumer.poll(0.5)  # it is connected before the time counts
        started = time.monotonic()
        args = ["stream", "--dsn", database.socket_dsn, "--bootstrap-servers", rig.broker.bootstrap]
        process = subprocess.Popen(
            [EXECUTABLE, *args, "--topic", topic, "--metrics-address", "off"],
            stderr=subprocess.DEVNULL,
            env=environment(),
        )
        try:
            while time.monotonic() - started < PATIENCE_SECONDS:
                message = consumer.poll(0.05)
                if message is not None and row_id(message):
                    return time.monotonic() - started
            raise RunFailed(f"no row within {PATIENCE_SECONDS:.0f} s of the start")
        finally:
            os.kill(process.pid, signal.SIGTERM)
            process.wait()
            consumer.close()
