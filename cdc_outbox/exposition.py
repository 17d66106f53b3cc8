"""The metrics as Prometheus reads them. Imported at the first scrape: prometheus_client takes 20 ms that a start can
do without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from platform import python_version

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from cdc_outbox import __version__
from cdc_outbox.metrics import LATENCY_BUCKETS, Figures, ReadSlot
from cdc_outbox.slot_watch import MISSING, Reading

WAL_STATUSES = ("reserved", "extended", "unreserved", "lost", MISSING)
UNKNOWN = float("nan")
"""The value of a series that must exist while nothing is known yet: no comparison with it is true."""

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


def scrape(figures: Figures, read_slot: ReadSlot, accept: str) -> tuple[bytes, str]:
    """The page, and its content type, for a client that takes `accept`."""
    registry = CollectorRegistry()
    registry.register(RelayCollector(figures, read_slot))
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type
