"""`verify`: the nine promises tried on the operator's own Postgres and Kafka, and a table of what came of it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import FrameType

from cdc_outbox import gates
from cdc_outbox.config import Settings
from cdc_outbox.errors import OutboxError, Stopped
from cdc_outbox.scratch import Scratch, scratch
from cdc_outbox.trial import NO_PURGE, Found, Trial

LONGEST_SECONDS = 110.0


@dataclass(frozen=True, slots=True)
class Result:
    """`verdict`: ok or fail; `note`: what could not be tried, or what was not as promised."""

    gate: str
    promise: str
    tried: str
    figures: Mapping[str, float]
    verdict: str
    note: str
    seconds: float

    def __str__(self) -> str:
        figures = ", ".join(f"{_number(value)} {name}" for name, value in self.figures.items())
        lines = [f"{self.gate}  {self.verdict:<5} {self.promise}"]
        lines += [f"{'':10}{line}" for line in (self.tried, figures, self.note) if line]
        return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def verify(
    settings: Settings, topic: str | None, say: Callable[[Result], None], only: Sequence[str] = ()
) -> list[Result]:
    """Each result as it comes, and all of them.

    `topic`: one that exists, or None for one of its own; `only`: these gates, if any are named.
    Raises PreconditionError and the like if nothing could be tried, and OutboxError if it was stopped.
    """
    results: list[Result] = []
    chosen = [gate for gate in gates.ALL if gate in only or not only]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        deadline = time.monotonic() + LONGEST_SECONDS
        with scratch(settings, topic) as made:
            with made.translated("connecting"):
                trial = Trial(made, deadline)
            trial.relay(*NO_PURGE)  # if no relay can run here, say why, once
            for gate in chosen:
                results.append(_try(gate, trial, made))
                say(results[-1])
    except Stopped:
        raise OutboxError(f"stopped after {len(results)} of {len(chosen)} gates") from None
    return results


def _try(gate: str, trial: Trial, made: Scratch) -> Result:
    promise, function = gates.ALL[gate]
    start = time.monotonic()
    try:
        with made.translated(gate):
            if start > trial.deadline:
                raise OutboxError(f"not tried: {LONGEST_SECONDS:.0f} s were not enough for the gates before it")
            found, verdict = function(trial), "ok"
    except Stopped:
        raise
    except OutboxError as error:
        found, verdict = Found("", {}, str(error)), "fail"
        trial.start_over()
    return Result(gate, promise, found.tried, found.figures, verdict, found.note, time.monotonic() - start)


def _stop(number: int, frame: FrameType | None) -> None:
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise Stopped


def kept(results: Sequence[Result]) -> bool:
    return all(result.verdict == "ok" for result in results)


def results_as_json(results: Sequence[Result]) -> str:
    return json.dumps({"ok": kept(results), "gates": [asdict(result) for result in results]})
