"""What the relay counts, and how Prometheus reads it. Metrics observe: nothing waits for them.

The relay adds to plain attributes, once per batch; a collector reads them when somebody scrapes. (Measured: a
prometheus_client counter costs 0.4 to 1.2 µs an increment, as much as a tenth of a row.)
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from platform import python_version

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from cdc_outbox import __version__
from cdc_outbox.errors import OutboxError
from cdc_outbox.slot_watch import MISSING, Reading

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
"""Seconds."""

FAILURE_KINDS = ("refused", "failed")
SIDES = ("postgres", "kafka")
WAL_STATUSES = ("reserved", "extended", "unreserved", "lost", MISSING)
UNKNOWN = float("nan")
"""The value of a series that must exist while nothing is known yet: no comparison with it is true."""


ReadSlot = Callable[[], Reading | None]
"""What SlotWatch answers to a scrape."""


class Histogram:
    """Counts per bucket and a sum; one bisect per observation (0.2 µs)."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BUCKETS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(LATENCY_BUCKETS, seconds)] += 1
        self.total += seconds


@dataclass(frozen=True, slots=True)
class Failure:
    """`at` is Unix time."""

    at: float
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class Purged:
    """One round of the purge; `at` is Unix time."""

    at: float
    rows: int


@dataclass(slots=True)
class Figures:
    """Everything that is watched. Written by the relay's thread and the purge's, read by the exporter's."""

    slot_name: str
    streaming: bool = False
    state: str = "starting"
    """starting, standby, streaming, draining, stopped, or failed."""
    reason: str = ""
    """Why it stands by or failed: who holds the slot, or the error that ended the session."""
    received_lsn: int = 0
    confirmed_lsn: int = 0
    pending_since: float | None = None
    """Commit time (Unix) of the oldest transaction not fully acknowledged; stays when the stream dies."""
    last_progress: float = field(default_factory=time.monotonic)
    last_confirm: float = 0.0
    in_flight_rows: int = 0
    relayed_rows: int = 0
    relayed_transactions: int = 0
    relayed_bytes: int = 0
    dead_letters: int = 0
    purged_rows: int = 0
    last_purge: Purged | None = None
    last_error: Failure | None = None
    """Stays when it is over, so that whoever looks later sees what it was."""
    visibility_wait_seconds: float = 0.0
    commit_to_ack: Histogram = field(default_factory=Histogram)
    delivery_failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAILURE_KINDS, 0))
    reconnects: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIDES, 0))

    def enter(self, state: str, reason: str = "") -> None:
        self.state, self.reason = state, reason
        if state == "standby":
            self.pending_since = None  # what was pending is now another relay's; a reading tells how it fares

    def note(self, error: OutboxError) -> None:
        self.last_error = Failure(time.time(), str(error), error.hint)

    def purged(self, rows: int) -> None:
        """A round has ended."""
        self.purged_rows += rows
        self.last_purge = Purged(time.time(), rows)

    def begin_session(self, end_of_wal: int) -> None:
        """After a failover the new server's WAL may end below what was received from the old one."""
        self.received_lsn = min(self.received_lsn, end_of_wal)

    def account(self, received_lsn: int, pending_since: float | None) -> None:
        """What a session knows now. It begins below where the last one died: until it has come as far again, what was
        pending then still is."""
        if pending_since is None and received_lsn < self.received_lsn:
            return
        if pending_since is not None and self.pending_since is None:
            self.last_progress = time.monotonic()  # nothing can stand still before there is work
        self.pending_since = pending_since
        self.received_lsn = max(self.received_lsn, received_lsn)

    def waiting_since(self, reading: Reading | None) -> float | None:
        """Monotonic: since when a row waits of which Postgres tells and the stream did not, as when it is dead."""
        if reading is None or self.confirmed_lsn > reading.confirmed_flush_lsn:
            return None  # something was confirmed since
        return reading.waiting_since

    def oldest_unacked_seconds(self, reading: Reading | None = None) -> float:
        since = self.pending_since  # once: the relay's thread may be done with it at any moment
        own = 0.0 if since is None else max(0.0, time.time() - since)
        waiting = self.waiting_since(reading)
        return own if waiting is None else max(own, time.monotonic() - waiting)

    def lag_bytes(self, reading: Reading | None = None) -> int:
        """WAL not confirmed; 0 when nothing is pending, since an idle relay confirms in steps."""
        if self.pending_since is None and self.waiting_since(reading) is None:
            return 0
        end, confirmed = self.received_lsn, self.confirmed_lsn
        if reading is not None:
            end, confirmed = max(end, reading.wal_position), max(confirmed, reading.confirmed_flush_lsn)
        return max(0, end - confirmed)

    def not_ready(self, stalled_seconds: float) -> str | None:
        """Why the relay is not doing its work, or None."""
        if self.state != "streaming":
            return f"{self.state}: {self.reason}" if self.reason else self.state
        standing = time.monotonic() - self.last_progress
        if self.pending_since is not None and standing > stalled_seconds:
            return f"stalled: nothing acknowledged or confirmed for {standing:.0f} s while work is pending"
        return None


GAUGES: tuple[tuple[str, str, Callable[[Figures, Reading | None], float]], ...] = (
    ("slot_lag_bytes", "WAL not confirmed while rows are pending, else 0", Figures.lag_bytes),
    ("oldest_unacked_seconds", "age of the oldest commit not acknowledged", Figures.oldest_unacked_seconds),
    (
        "slot_retained_wal_bytes",
        "WAL that the slot holds back on the server",
        lambda f, r: r.retained_bytes if r else UNKNOWN,
    ),
    (
        "slot_safe_wal_bytes",
        "WAL that can be written before the slot is lost; +Inf without max_slot_wal_keep_size",
        lambda f, r: r.safe_bytes if r else UNKNOWN,
    ),
    ("slot_active", "1 while a relay holds the slot", lambda f, r: int(r.active) if r else UNKNOWN),
    (
        "slot_read_timestamp_seconds",
        "when Postgres last told of the slot; 0 if never",
        lambda f, r: r.at if r else 0.0,
    ),
    (
        "in_flight_rows",
        "rows handed to the producer and not yet acknowledged",
        lambda f, r: f.in_flight_rows,
    ),
    ("streaming", "1 while this relay streams, 0 in standby", lambda f, r: int(f.streaming)),
    (
        "last_confirm_timestamp_seconds",
        "when the slot's position was last confirmed",
        lambda f, r: f.last_confirm,
    ),
)
COUNTERS: tuple[tuple[str, str, Callable[[Figures], float]], ...] = (
    ("relayed_rows", "rows acknowledged by Kafka", lambda f: f.relayed_rows),
    ("relayed_transactions", "transactions with rows, acknowledged", lambda f: f.relayed_transactions),
    ("relayed_bytes", "bytes of replication messages with rows", lambda f: f.relayed_bytes),
    ("dead_letters", "rows set aside", lambda f: f.dead_letters),
    ("purged_rows", "relayed rows deleted", lambda f: f.purged_rows),
    (
        "visibility_wait_seconds",
        "time transactions waited to become visible",
        lambda f: f.visibility_wait_seconds,
    ),
)
METRIC_NAMES = (
    *(f"cdc_outbox_{name}" for name, _, _ in GAUGES),
    *(f"cdc_outbox_{name}_total" for name, _, _ in COUNTERS),
    "cdc_outbox_slot_wal_status",
    "cdc_outbox_delivery_failures_total",
    "cdc_outbox_reconnects_total",
    "cdc_outbox_commit_to_ack_seconds",
    "cdc_outbox_build_info",
)


class RelayCollector(Collector):
    def __init__(self, figures: Figures, read_slot: ReadSlot = lambda: None) -> None:
        self.figures = figures
        self.read_slot = read_slot

    def collect(self) -> Iterator[Metric]:
        figures = self.figures
        reading = self.read_slot()
        slot = [figures.slot_name]
        for name, text, read in GAUGES:
            gauge = GaugeMetricFamily(f"cdc_outbox_{name}", text, labels=["slot_name"])
            gauge.add_metric(slot, read(figures, reading))
            yield gauge
        yield self._wal_status(slot, reading)
        for name, text, count in COUNTERS:
            counter = CounterMetricFamily(f"cdc_outbox_{name}", text, labels=["slot_name"])
            counter.add_metric(slot, count(figures))
            yield counter
        failures = CounterMetricFamily(
            "cdc_outbox_delivery_failures", "records not taken by Kafka", labels=["slot_name", "kind"]
        )
        for kind, failed in figures.delivery_failures.items():
            failures.add_metric([*slot, kind], failed)
        yield failures
        reconnects = CounterMetricFamily(
            "cdc_outbox_reconnects", "sessions rebuilt from the slot, by cause", labels=["slot_name", "side"]
        )
        for side, rebuilt in figures.reconnects.items():
            reconnects.add_metric([*slot, side], rebuilt)
        yield reconnects
        yield self._latency(slot)
        build = GaugeMetricFamily("cdc_outbox_build_info", "always 1", labels=["version", "python"])
        build.add_metric([__version__, python_version()], 1)
        yield build

    def _wal_status(self, slot: list[str], reading: Reading | None) -> Metric:
        family = GaugeMetricFamily(
            "cdc_outbox_slot_wal_status",
            "1 for the slot's wal_status; missing: there is no such slot",
            labels=["slot_name", "status"],
        )
        for status in WAL_STATUSES:
            family.add_metric([*slot, status], int(reading.wal_status == status) if reading else UNKNOWN)
        return family

    def _latency(self, slot: list[str]) -> Metric:
        histogram = self.figures.commit_to_ack
        family = HistogramMetricFamily(
            "cdc_outbox_commit_to_ack_seconds",
            "from a transaction's commit to Kafka's acknowledgement of its last row",
            labels=["slot_name"],
        )
        running, buckets = 0, []
        for bound, count in zip((*map(str, LATENCY_BUCKETS), "+Inf"), histogram.counts, strict=True):
            running += count
            buckets.append((bound, running))
        family.add_metric(slot, buckets=buckets, sum_value=histogram.total)
        return family


def registry(figures: Figures, read_slot: ReadSlot = lambda: None) -> CollectorRegistry:
    own = CollectorRegistry()
    own.register(RelayCollector(figures, read_slot))
    return own
