"""`doctor`: every precondition, each with what was found and what mends it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from cdc_outbox import checks_kafka, checks_outbox, checks_server
from cdc_outbox.checks_kafka import Kafka
from cdc_outbox.config import Settings
from cdc_outbox.errors import ConfigError, OutboxError, Stopped
from cdc_outbox.facts import Facts
from cdc_outbox.finding import Checks, Finding, fail, skip
from cdc_outbox.wakeup import Wakeup

Subject = TypeVar("Subject")


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    finding: Finding

    def __str__(self) -> str:
        remedy = f"\n{'':<6}-> {self.finding.remedy}" if self.finding.remedy else ""
        return f"{self.finding.verdict:<6}{self.name}: {self.finding.found}{remedy}"


def examine(settings: Settings, wakeup: Wakeup) -> Iterator[Line]:
    """One line a check, as it is done; Kafka's only if a broker is named. Raises Stopped, ConfigError."""
    facts: Facts | None = None
    try:
        try:
            facts = Facts(settings, wakeup)
            for checks in (checks_server.check, checks_outbox.check):
                yield from _run(checks, facts, lost=lambda: facts is not None and facts.look.lost)
            if facts.look.lost:
                facts.close()
                facts = None
        except (Stopped, ConfigError):
            raise
        except OutboxError as error:
            yield Line("Postgres", fail(str(error), error.hint or "start it, or give another --dsn"))
        if settings.bootstrap_servers:
            yield from _run(checks_kafka.check, Kafka(settings, facts))
        else:
            yield Line("Kafka", skip("no --bootstrap-servers given"))
    finally:
        if facts is not None:
            facts.close()


def _run(checks: Checks[Subject], subject: Subject, lost: Callable[[], bool] = lambda: False) -> Iterator[Line]:
    for name, check in checks.all:
        try:
            yield Line(name, check(subject))
        except Stopped:
            raise
        except OutboxError as error:
            if lost():
                raise
            yield Line(name, fail(str(error).removeprefix("looking: "), error.hint))


def failed(lines: Sequence[Line]) -> bool:
    return any(line.finding.verdict == "fail" for line in lines)


def findings_as_json(lines: Sequence[Line]) -> str:
    checks = [{"name": line.name, **asdict(line.finding)} for line in lines]
    return json.dumps({"ok": not failed(lines), "checks": checks})
