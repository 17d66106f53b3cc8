"""What was measured, as a table and as JSON, and the bars it is held against."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.drain import Drain
from benchmarks.idle import Idle
from benchmarks.latency import Latency

MB = 1e6
DRAIN_FIGURES = (
    "rows_per_second",
    "yardstick_rows_per_second",
    "ratio",
    "whole_ratio",
    "cpu_seconds_per_million",
    "streaming_cpu_seconds_per_million",
    "peak_rss_bytes",
    "rss_growth_bytes",
    "void",
)
RATIO_BARS = {100: 0.4, 1: 0.5}
CPU_BAR = 6.5
RSS_BAR = 120 * MB
LATENCY_BARS = {1000: 25.0}
IDLE_CPU_BAR = 0.2


@dataclass(slots=True)
class Report:
    parts: dict[str, object]
    """What ran: versions, processors."""
    drains: dict[str, Drain] = field(default_factory=dict)
    latencies: list[Latency] = field(default_factory=list)
    idle: Idle | None = None
    failed: list[str] = field(default_factory=list)

    @property
    def void(self) -> list[str]:
        """Runs whose figures mean nothing, because rows are missing, repeated or out of order."""
        drains = [name for name, drain in self.drains.items() if drain.void]
        latencies = [f"latency {found.transactions_per_second}/s" for found in self.latencies if found.void]
        return drains + latencies + self.failed

    def as_dict(self) -> dict[str, Any]:
        return {
            "parts": self.parts,
            "drain": {
                name: {**asdict(drain), **{figure: getattr(drain, figure) for figure in DRAIN_FIGURES}}
                for name, drain in self.drains.items()
            },
            "latency": [asdict(found) for found in self.latencies],
            "idle": asdict(self.idle) if self.idle else None,
            "bars": [{**asdict(bar), "passed": bar.passed} for bar in bars(self)],
            "void": self.void,
        }


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    value: float
    limit: float
    at_least: bool = False
    below: bool = False
    """The limit itself does not pass."""
    measured: bool = True

    @property
    def passed(self) -> bool:
        if not self.measured:
            return False
        if self.at_least:
            return self.value >= self.limit
        return self.value < self.limit if self.below else self.value <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<" if self.below else "<="
        verdict = "pass" if self.passed else f"short by {abs(self.value - self.limit):.3g}"
        if not self.measured:
            verdict = "not measured: the writers fell behind their schedule"
        return f"{self.name:<52} {self.value:>8.3g} {sign:>2} {self.limit:<6g} {verdict}"


def bars(report: Report) -> Iterator[Bar]:
    for name, drain in report.drains.items():
        limit = RATIO_BARS.get(drain.rows_per_transaction)
        if limit is not None:
            yield Bar(f"{name}: ratio to pg_recvlogical", drain.ratio, limit, at_least=True)
        if drain.rows_per_transaction == 100:
            yield Bar(f"{name}: CPU s per million rows", drain.cpu_seconds_per_million, CPU_BAR)
        yield Bar(f"{name}: peak RSS, MB", drain.peak_rss_bytes / MB, RSS_BAR / MB)
    for found in report.latencies:
        rate = found.transactions_per_second
        if rate in LATENCY_BARS:
            yield Bar(f"latency {rate}/s: p99, ms", found.p99_ms, LATENCY_BARS[rate], measured=found.on_schedule)
        yield Bar(f"latency {rate}/s: peak RSS, MB", found.peak_rss_bytes / MB, RSS_BAR / MB)
    if report.idle is not None:
        yield Bar("idle: transactions", report.idle.transactions, 0)
        yield Bar("idle: CPU s", report.idle.cpu_seconds, IDLE_CPU_BAR, below=True)
        yield Bar("idle: peak RSS, MB", report.idle.peak_rss_bytes / MB, RSS_BAR / MB)


def table(report: Report) -> str:
    lines = [", ".join(f"{name} {value}" for name, value in report.parts.items())]
    if report.drains:
        lines += ["", f"{'drain (medians)':<34}{'relay':>10}{'recvlogical':>13}{'ratio':>8}{'whole':>8}"]
        lines[-1] += f"{'CPU s/M':>9}{'peak MB':>9}{'growth':>8}"
    for name, drain in report.drains.items():
        lines.append(
            f"{name:<34}{drain.rows_per_second:>8,.0f}/s{drain.yardstick_rows_per_second:>11,.0f}/s"
            f"{drain.ratio:>8.2f}{drain.whole_ratio:>8.2f}{drain.cpu_seconds_per_million:>9.2f}"
            f"{drain.peak_rss_bytes / MB:>9.0f}{drain.rss_growth_bytes / MB:>8.0f}"
        )
    if report.latencies:
        lines += ["", f"{'COMMIT to consumer, ms':<34}{'p50':>10}{'p99':>10}{'max':>10}{'writers late, p99':>20}"]
    for found in report.latencies:
        lines.append(
            f"{f'{found.transactions_per_second} transactions/s':<34}{found.p50_ms:>10.1f}{found.p99_ms:>10.1f}"
            f"{found.max_ms:>10.1f}{found.late_p99_ms:>20.1f}"
        )
    if (found_idle := report.idle) is not None:
        lines += ["", f"idle for {found_idle.seconds:.0f} s: {found_idle.transactions} transactions"]
        lines[-1] += f", {found_idle.cpu_seconds:.2f} CPU s"
    lines += ["", *map(str, bars(report))]
    lines += [f"void: {reason}" for reason in report.void]
    return "\n".join(lines)
