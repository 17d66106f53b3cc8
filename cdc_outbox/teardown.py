"""`drop-slot`: the slot and its checkpoint; and, before that, what dropping them would leave or give up."""

from __future__ import annotations

import time
from dataclasses import dataclass

from cdc_outbox.config import Settings
from cdc_outbox.conninfo import complete_conninfo
from cdc_outbox.errors import SlotInUse
from cdc_outbox.lsn import format_lsn
from cdc_outbox.objects import find_slot, published, resolve, slot_holder, slot_in_use
from cdc_outbox.query import LONG_SECONDS, Queries
from cdc_outbox.wakeup import Wakeup

COUNT_LIMIT = 1_000_000
LEAVING_SECONDS = 5.0

_RETAINED = """
select coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn), 0)::bigint
from pg_replication_slots where slot_name = $1"""


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """What dropping the slot would leave, or give up."""

    slot: str
    exists: bool
    held_by: str | None = None
    position: str | None = None
    wal_bytes: int = 0
    outbox: str | None = None
    rows: int = 0

    def lines(self) -> list[str]:
        if not self.exists:
            return [f"slot {self.slot} does not exist"]
        lines = [f"slot {self.slot}: confirmed up to {self.position}, holds {self.wal_bytes} bytes of WAL"]
        if self.held_by:
            lines.append(f"it is held by {self.held_by}")
        if self.outbox:
            more = " or more" if self.rows >= COUNT_LIMIT else ""
            lines.append(f"{self.outbox}: {self.rows}{more} rows not purged, sent again by the next init-slot")
        return lines


def left_behind(settings: Settings, wakeup: Wakeup) -> LeftBehind:
    queries = Queries(complete_conninfo(settings.dsn), wakeup)
    try:
        slot = find_slot(queries, settings.slot)
        if slot is None:
            return LeftBehind(settings.slot, exists=False)
        retained = queries.call(_RETAINED, [settings.slot], doing="measuring the WAL held")
        objects = resolve(queries, settings.table, settings.slot, settings.publication)
        rows = 0
        if objects is not None:
            ours = f"select from {objects.outbox} where {published(queries, objects)} limit {COUNT_LIMIT}"
            count = f"select count(*) from ({ours}) o"
            rows = int(queries.call(count, doing="counting rows", seconds=LONG_SECONDS)[0][0] or 0)
        return LeftBehind(
            settings.slot,
            exists=True,
            held_by=slot_holder(queries, settings.slot) if slot.active_pid else None,
            position=format_lsn(slot.confirmed_flush_lsn),
            wal_bytes=int(retained[0][0] or 0) if retained else 0,
            outbox=objects.outbox if objects else None,
            rows=rows,
        )
    finally:
        queries.close()


def drop(settings: Settings, wakeup: Wakeup) -> None:
    """Drop the slot and forget its checkpoint. Raises SlotInUse."""
    queries = Queries(complete_conninfo(settings.dsn), wakeup)
    try:
        find_slot(queries, settings.slot)  # refuses a slot of another kind
        drop_slot(queries, wakeup, settings.slot)
        objects = resolve(queries, settings.table, settings.slot, settings.publication)
        if objects is None:
            return
        if queries.call("select to_regclass($1)", [objects.checkpoint], doing="looking")[0][0] is not None:
            queries.call(
                f"delete from {objects.checkpoint} where slot_name = $1",
                [settings.slot],
                doing="forgetting the checkpoint",
            )
    finally:
        queries.close()


def drop_slot(queries: Queries, wakeup: Wakeup, name: str) -> None:
    """Drop it if it exists. A walsender that is just leaving gets a few seconds. Raises SlotInUse naming the holder."""
    deadline = time.monotonic() + LEAVING_SECONDS
    while True:
        try:
            queries.call(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = $1",
                [name],
                doing=f"dropping slot {name}",
            )
            return
        except SlotInUse:
            if time.monotonic() > deadline:
                raise slot_in_use(queries, name, "stop that relay first") from None
            wakeup.wait((), 0.2)
