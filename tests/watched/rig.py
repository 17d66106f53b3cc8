"""What `status`, `doctor`, `/readyz` and `/metrics` say of a RelayRig."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from cdc_outbox.config import Settings
from cdc_outbox.doctor import Line, examine, failed, findings_as_json
from cdc_outbox.http import MetricsServer
from cdc_outbox.metrics import Figures
from cdc_outbox.setup import Setup
from cdc_outbox.slot_watch import SlotWatch
from cdc_outbox.status import look
from cdc_outbox.status_report import Status
from cdc_outbox.status_text import lines
from cdc_outbox.wakeup import Wakeup
from tests.fix_command import Running, scrape
from tests.fix_postgres import Database
from tests.relay_rig import RelayRig, metrics_url
from tests.slot_rig import SlotRig
from tests.waiting import eventually

SEGMENT = 16 * 1024**2


class Report:
    """Of `doctor`."""

    def __init__(self, found: list[Line]) -> None:
        self.failed = failed(found)
        self.findings = {line.name: line.finding for line in found}
        assert json.loads(findings_as_json(found))["ok"] is not self.failed

    def verdicts(self, verdict: str) -> set[str]:
        return {name for name, finding in self.findings.items() if finding.verdict == verdict}

    def expect(self, name: str, verdict: str, *words: str) -> None:
        """`words` are in what was found, or in the remedy."""
        finding = self.findings[name]
        assert finding.verdict == verdict, finding
        assert finding.remedy or verdict in ("ok", "skip"), finding
        for word in words:
            assert word in f"{finding.found} -> {finding.remedy}", f"no {word!r} in {finding}"


def settings_of(rig: SlotRig, *, kafka: bool = False, **changes: Any) -> Settings:
    broker = {"bootstrap_servers": rig.broker.bootstrap, "topic": rig.topic} if kafka else {}
    own = {"dsn": rig.dsn, "table": rig.table, "slot": rig.slot, "publication": rig.publication}
    return Settings(**{**own, **broker, **changes})


def set_up(rig: SlotRig, **options: Any) -> None:
    """What the command `init-slot` does, without starting a process."""
    with closing(Wakeup()) as wakeup:
        Setup(settings_of(rig), wakeup, **options).run()


def _status(rig: SlotRig, **changes: Any) -> Status:
    found: list[Status] = []
    with closing(Wakeup()) as wakeup:
        look(settings_of(rig, **changes), wakeup, None, found.append)
    return found[0]


def status(rig: SlotRig, **changes: Any) -> Any:
    """What `status --json` prints, its objects as attributes; without starting a process."""
    return json.loads(_status(rig, **changes).as_json(), object_hook=lambda found: SimpleNamespace(**found))


def status_text(rig: SlotRig) -> str:
    return "\n".join(lines(_status(rig)))


def doctor(rig: SlotRig, *, kafka: bool = False, **changes: Any) -> Report:
    """What the command `doctor` finds, without starting a process."""
    with closing(Wakeup()) as wakeup:
        return Report(list(examine(settings_of(rig, kafka=kafka, **changes), wakeup)))


@dataclass(frozen=True, slots=True)
class Page:
    """A metrics page, with one slot's samples on it."""

    url: str

    def value(self, name: str, **labels: str) -> float:
        """Of `cdc_outbox_` + name; the labels beside slot_name."""
        samples = scrape(f"{self.url}/metrics")
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        (value,) = [
            value
            for sample, value in samples.items()
            if sample.partition("{")[0] == f"cdc_outbox_{name}" and all(label in sample for label in wanted)
        ]
        return value

    @property
    def wal_status(self) -> str:
        samples = scrape(f"{self.url}/metrics")
        held = [name for name, value in samples.items() if "slot_wal_status" in name and value == 1]
        assert len(held) == 1, held
        return held[0].partition('status="')[2].partition('"')[0]


def page(relay: Running) -> Page:
    """Once Postgres has told of the slot."""
    return _read(Page(metrics_url(relay)))


def _read(page: Page) -> Page:
    eventually(lambda: page.value("slot_read_timestamp_seconds") > 0, 20, "the slot is read")
    return page


@contextmanager
def exporter(rig: SlotRig, **changes: Any) -> Iterator[Page]:
    """The relay's exporter without its relay: for states in which that one ends."""
    watch = SlotWatch(settings_of(rig, **changes))
    server = MetricsServer("127.0.0.1:0", Figures(rig.slot), watch.reading)
    try:
        yield _read(Page(f"http://127.0.0.1:{server.port}"))
    finally:
        server.close()
        watch.close()


def write_wal(database: Database, segments: int) -> None:
    """Whole segments, at little cost."""
    with database.connect() as connection:
        for _ in range(segments):
            connection.execute("select pg_logical_emit_message(false, 'test', 'x')")
            connection.execute("select pg_switch_wal()")


def lose_slot(rig: RelayRig) -> None:
    """On a server whose max_slot_wal_keep_size is a segment or less, while nothing is confirmed."""

    def lost() -> bool:
        write_wal(rig.database, 2)
        rig.database.execute("checkpoint")
        query = "select wal_status from pg_replication_slots where slot_name = %s"
        return bool(rig.database.fetch_value(query, (rig.slot,)) == "lost")

    eventually(lost, 20, "the slot is lost")
