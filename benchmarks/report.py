"""What was measured, as a table and as JSON, and the bars it is held against."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.drain import Drain
from benchmarks.growth import BASE
from benchmarks.idle import Idle
from benchmarks.latency import Latency
from benchmarks.scale import Scale

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
FLOOR_FIGURES = ("floor_ratio", "floor_cpu_seconds_per_million")
RATIO_BARS = {"kafka": {100: 0.55, 1: 0.75}, "tansu": {100: 0.65, 1: 0.75}}
"""By broker and rows a transaction."""
CPU_BAR = 4.0
RSS_BAR = 100 * MB
LATENCY_BARS = {1000: (4.0, 10.0)}
"""p50 and p99, milliseconds, by transactions a second."""
IDLE_CPU_BAR = 0.2
TEN_TIMES_BAR = 0.85
BIG_TRANSACTION_BAR = 32 * MB
KAFKA_AWAY_BAR = 128 * MB
FIRST_ROW_BAR = 0.8


@dataclass(slots=True)
class Report:
    parts: dict[str, object]
    """What ran: versions, processors."""
    drains: dict[str, Drain] = field(default_factory=dict)
    latencies: list[Latency] = field(default_factory=list)
    idle: Idle | None = None
    growth: dict[str, Drain] = field(default_factory=dict)
    scale: Scale | None = None
    failed: list[str] = field(default_factory=list)

    @property
    def void(self) -> list[str]:
        """Runs whose figures mean nothing, because rows are missing, repeated or out of order."""
        scaled = {}
        if self.scale is not None:
            scaled = {"ten times": self.scale.ten_times, "one transaction": self.scale.one_transaction}
        every = {**self.drains, **self.growth, **scaled}
        drains = [name for name, drain in every.items() if drain.void]
        latencies = [f"latency {found.transactions_per_second}/s" for found in self.latencies if found.void]
        return drains + latencies + self.failed

    def as_dict(self) -> dict[str, Any]:
        return {
            "parts": self.parts,
            "drain": _as_dict(self.drains),
            "growth": _as_dict(self.growth),
            "scale": asdict(self.scale) if self.scale else None,
            "latency": [asdict(found) for found in self.latencies],
            "idle": asdict(self.idle) if self.idle else None,
            "bars": [{**asdict(bar), "passed": bar.passed} for bar in bars(self)],
            "void": self.void,
        }


def _as_dict(drains: dict[str, Drain]) -> dict[str, Any]:
    return {
        name: {**asdict(drain), **{figure: getattr(drain, figure) for figure in _figures(drain)}}
        for name, drain in drains.items()
    }


def _figures(drain: Drain) -> tuple[str, ...]:
    return DRAIN_FIGURES + (FLOOR_FIGURES if drain.floor else ())


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

    def against(self, recorded: dict[str, float]) -> str:
        """With the difference from the last recorded run."""
        before = recorded.get(self.name)
        if not before or not self.measured:
            return str(self)
        return f"{self}, recorded {before:.3g} ({self.value / before - 1:+.0%})"

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<" if self.below else "<="
        verdict = "pass" if self.passed else f"short by {abs(self.value - self.limit):.3g}"
        if not self.measured:
            verdict = "not measured: the writers fell behind their schedule"
        return f"{self.name:<52} {self.value:>8.3g} {sign:>2} {self.limit:<6g} {verdict}"


def bars(report: Report) -> Iterator[Bar]:
    ratio_bars = RATIO_BARS.get(str(report.parts.get("broker")), {})
    for name, drain in report.drains.items():
        per_transaction = drain.shape.rows_per_transaction
        if per_transaction in ratio_bars:
            limit = ratio_bars[per_transaction]
            yield Bar(f"{name}: ratio to pg_recvlogical", drain.ratio, limit, at_least=True)
        if per_transaction == 100:
            yield Bar(f"{name}: CPU s per million rows", drain.cpu_seconds_per_million, CPU_BAR)
        yield Bar(f"{name}: peak RSS, MB", drain.peak_rss_bytes / MB, RSS_BAR / MB)
    for found in report.latencies:
        rate = found.transactions_per_second
        if rate in LATENCY_BARS:
            p50, p99 = LATENCY_BARS[rate]
            yield Bar(f"latency {rate}/s: p50, ms", found.p50_ms, p50, measured=found.on_schedule)
            yield Bar(f"latency {rate}/s: p99, ms", found.p99_ms, p99, measured=found.on_schedule)
        yield Bar(f"latency {rate}/s: peak RSS, MB", found.peak_rss_bytes / MB, RSS_BAR / MB)
    if report.idle is not None:
        yield Bar("idle: transactions", report.idle.transactions, 0)
        yield Bar("idle: CPU s", report.idle.cpu_seconds, IDLE_CPU_BAR, below=True)
        yield Bar("idle: peak RSS, MB", report.idle.peak_rss_bytes / MB, RSS_BAR / MB)
    if report.scale is not None:
        scale = report.scale
        yield Bar("ten times the backlog: rate against the base", scale.rate_at_ten_times, TEN_TIMES_BAR, at_least=True)
        yield Bar("ten times the backlog: peak RSS, MB", scale.ten_times.peak_rss_bytes / MB, RSS_BAR / MB)
        growth = scale.one_transaction.rss_growth_bytes
        yield Bar("all of it in one transaction: RSS growth, MB", growth / MB, BIG_TRANSACTION_BAR / MB)
        yield Bar("all of it waiting, Kafka away: peak RSS, MB", scale.kafka_away_rss_bytes / MB, KAFKA_AWAY_BAR / MB)
        yield Bar("start to first row, s", scale.first_row_seconds, FIRST_ROW_BAR)


def table(report: Report, recorded: dict[str, float]) -> str:
    """`recorded`: the values of an earlier run, by the name of their bar."""
    lines = [", ".join(f"{name} {value}" for name, value in report.parts.items())]
    drains = dict(report.drains)
    if report.scale is not None:
        drains |= {"scale: the base": report.scale.base, "ten times the backlog": report.scale.ten_times}
        drains["all of it in one transaction"] = report.scale.one_transaction
    if drains:
        lines += ["", f"{'drain (medians)':<34}{'relay':>10}{'recvlogical':>13}{'ratio':>8}{'whole':>8}"]
        lines[-1] += f"{'CPU s/M':>9}{'peak MB':>9}{'growth':>8}"
    for name, drain in drains.items():
        lines += _drain_lines(name, drain)
    if report.growth:
        lines += ["", *_growth_lines(report.growth)]
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
    lines += ["", *(bar.against(recorded) for bar in bars(report))]
    lines += [f"void: {reason}" for reason in report.void]
    return "\n".join(lines)


def _drain_lines(name: str, drain: Drain) -> Iterator[str]:
    yield (
        f"{name:<34}{drain.rows_per_second:>8,.0f}/s{drain.yardstick_rows_per_second:>11,.0f}/s"
        f"{drain.ratio:>8.2f}{drain.whole_ratio:>8.2f}{drain.cpu_seconds_per_million:>9.2f}"
        f"{drain.peak_rss_bytes / MB:>9.0f}{drain.rss_growth_bytes / MB:>8.0f}"
    )
    if drain.floor:
        rate = drain.floor_ratio * drain.yardstick_rows_per_second
        yield (
            f"{'  the least with these libraries':<34}{rate:>8,.0f}/s{'':>13}{drain.floor_ratio:>8.2f}{'':>8}"
            f"{drain.floor_cpu_seconds_per_million:>9.2f}"
        )


def _growth_lines(growth: dict[str, Drain]) -> Iterator[str]:
    """Rates against the base case, of the relay and of the walsender alone."""
    base = growth[BASE]
    titles = f"{'relay':>11}{'of base':>9}{'recvlogical':>13}{'of base':>9}{'ratio':>7}{'CPU s/M':>9}"
    yield f"{'cost as it grows':<48}{titles}"
    for name, drain in growth.items():
        yield (
            f"{name:<48}{drain.rows_per_second:>9,.0f}/s{drain.rows_per_second / base.rows_per_second:>9.2f}"
            f"{drain.yardstick_rows_per_second:>11,.0f}/s"
            f"{drain.yardstick_rows_per_second / base.yardstick_rows_per_second:>9.2f}{drain.ratio:>7.2f}"
            f"{drain.streaming_cpu_seconds_per_million:>9.2f}"
        )
