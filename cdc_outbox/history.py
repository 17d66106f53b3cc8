"""The last 15 minutes in memory, for the plots of the page: whoever opens it sees what was, not only what comes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cdc_outbox.metrics import LATENCY_BUCKETS, Figures

STEP_SECONDS = 5.0
SPAN_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What the figures were at a moment (monotonic)."""

    at: float
    relayed_rows: int
    latencies: tuple[int, ...]
    """How many observations each bucket held."""
    oldest_unacked_seconds: float
    in_flight_rows: int


class History:
    """`sample` is for one thread; `series` for any."""

    def __init__(self, figures: Figures, step_seconds: float = STEP_SECONDS) -> None:
        self._figures = figures
        self._step_seconds = step_seconds
        self._samples: deque[Sample] = deque(maxlen=int(SPAN_SECONDS / STEP_SECONDS) + 1)

    def sample(self) -> None:
        """Cheap, and does nothing before the next step is due."""
        now = time.monotonic()
        if self._samples and now - self._samples[-1].at < self._step_seconds:
            return
        figures = self._figures
        self._samples.append(
            Sample(
                now,
                figures.relayed_rows,
                tuple(figures.commit_to_ack.counts),
                figures.oldest_unacked_seconds(),
                figures.in_flight_rows,
            )
        )

    def series(self) -> dict[str, list[float | None]]:
        """A value a step, oldest first; None where nothing was acknowledged. `age` is in seconds before now."""
        now = time.monotonic()
        found: dict[str, list[float | None]] = {
            name: [] for name in ("age", "rows_per_second", "latency_p50", "latency_p99", "lag_seconds")
        }
        for before, after in pairwise(list(self._samples)):
            acknowledged = [new - old for old, new in zip(before.latencies, after.latencies, strict=True)]
            found["age"].append(round(now - after.at, 1))
            rows = after.relayed_rows - before.relayed_rows
            found["rows_per_second"].append(round(rows / (after.at - before.at), 2))
            found["latency_p50"].append(quantile(acknowledged, 0.5))
            found["latency_p99"].append(quantile(acknowledged, 0.99))
            found["lag_seconds"].append(round(after.oldest_unacked_seconds, 3))
        return found


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Seconds, from counts per bucket as Histogram keeps them, evenly spread within a bucket; None without any.
    What lies above the last bound counts as that bound."""
    wanted = share * sum(counts)
    if not wanted:
        return None
    lower, passed = 0.0, 0
    for bound, count in zip(LATENCY_BUCKETS, counts, strict=False):
        if passed + count >= wanted:
            return round(lower + (bound - lower) * (wanted - passed) / count, 6)
        lower, passed = bound, passed + count
    return LATENCY_BUCKETS[-1]
