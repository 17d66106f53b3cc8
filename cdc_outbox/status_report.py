"""What `status` found, as values; JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cdc_outbox.errors import PreconditionError
from cdc_outbox.lsn import WAL_SEGMENT_BYTES, parse_lsn
from cdc_outbox.objects import parse_slot
from cdc_outbox.query import Row

SHORTEST_RATE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class SlotState:
    """`state`: missing, foreign (a slot of another kind has the name), lost, inactive or active."""

    name: str
    state: str
    problem: str | None = None
    active_pid: int | None = None
    held_by: str | None = None
    wal_status: str | None = None
    invalidation_reason: str | None = None
    restart_lsn: str | None = None
    confirmed_flush_lsn: str | None = None
    sent_lsn: str | None = None
    inactive_seconds: float | None = None
    failover: bool | None = None


@dataclass(frozen=True, slots=True)
class Lag:
    """`bytes`: WAL not confirmed, of any table. `seconds`: how long at most a row has waited, 0 if none does."""

    bytes: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Wal:
    """`left_bytes` is None where the server sets no limit. `seconds_left`: until then, at the rate since the last
    checkpoint (`rate_seconds` ago), should nothing be confirmed any more. `idle_seconds_left`: until
    idle_replication_slot_timeout."""

    position: str
    held_bytes: int | None
    limit_bytes: int | None
    left_bytes: int | None
    bytes_per_second: float | None
    rate_seconds: float | None
    seconds_left: float | None
    idle_seconds_left: float | None


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """`seconds` is None where this role may not know. `holds`: restart_lsn cannot move on before it ends."""

    pid: int | None
    prepared: str | None
    application: str | None
    database: str | None
    seconds: float | None
    xids: int
    holds: bool


@dataclass(frozen=True, slots=True)
class TableState:
    """`rows` as the server's statistics have it, a second or more behind; dead letters are counted, up to a limit."""

    name: str
    rows: int
    bytes: int
    oldest_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Status:
    at: str
    server_version: str
    database: str
    in_recovery: bool
    slot: SlotState
    lag: Lag
    wal: Wal
    transactions: tuple[OpenTransaction, ...]
    outbox: TableState | None
    dead_letters: TableState | None
    archive: TableState | None
    unseen: tuple[str, ...]

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def slot_state(name: str, raw: dict[str, Any], database: str | None) -> SlotState:
    """`raw`: one row of pg_replication_slots and what stands beside it; empty if there is none."""
    if not raw:
        return SlotState(name, "missing", problem="there is no such slot")
    problem, lost = None, None
    try:
        lost = parse_slot(name, (json.dumps(raw), database)).lost
    except PreconditionError as error:
        problem = str(error)
    return SlotState(
        name,
        state="foreign" if problem else "lost" if lost else "active" if raw["active_pid"] else "inactive",
        problem=problem,
        active_pid=raw["active_pid"],
        held_by=raw["held_by"] if raw["active_pid"] else None,
        wal_status=raw["wal_status"],
        invalidation_reason=lost,
        restart_lsn=raw["restart_lsn"],
        confirmed_flush_lsn=raw["confirmed_flush_lsn"],
        sent_lsn=raw["sent_lsn"],
        inactive_seconds=raw["inactive_seconds"],
        failover=raw.get("failover"),
    )


def wal_state(
    slot: SlotState,
    position: str,
    *,
    left: int | None,
    limit: float | None,
    written: tuple[float, float] | None,
    idle_timeout: float | None,
) -> Wal:
    """`written`: seconds and bytes since the last checkpoint; `idle_timeout`: seconds, None or 0 if there is none."""
    seconds, count = written or (0.0, 0.0)
    rate = max(0.0, count / seconds) if seconds >= SHORTEST_RATE_SECONDS else None
    left = 0 if slot.state == "lost" else left
    idle = slot.inactive_seconds if slot.state == "inactive" and idle_timeout else None
    return Wal(
        position=position,
        held_bytes=behind(position, slot.restart_lsn),
        limit_bytes=int(limit) if limit is not None and limit >= 0 else None,
        left_bytes=left,
        bytes_per_second=rate,
        rate_seconds=seconds if rate is not None else None,
        seconds_left=left / rate if left is not None and rate else None,
        idle_seconds_left=max(0.0, idle_timeout - idle) if idle is not None and idle_timeout else None,
    )


def open_transactions(rows: list[Row], slot: Mapping[str, Any]) -> tuple[OpenTransaction, ...]:
    """`slot`: a row of pg_replication_slots with `catalog_xmin_age`.

    A transaction holds the slot back if restart_lsn stays behind what is confirmed, and if it is about as old as
    catalog_xmin, which is the oldest one that ran beside it. On a busy server restart_lsn is some seconds behind
    without any: then the oldest one is far younger than that.
    """
    confirmed, restart, horizon = (slot.get(key) for key in ("confirmed_flush_lsn", "restart_lsn", "catalog_xmin_age"))
    stays_behind = bool(confirmed and restart and (behind(confirmed, restart) or 0) > WAL_SEGMENT_BYTES)
    return tuple(
        OpenTransaction(
            pid=int(pid) if pid else None,
            prepared=gid,
            application=application or None,
            database=database,
            seconds=number(seconds),
            xids=int(xids or 0),
            holds=stays_behind and horizon is not None and 2 * int(xids or 0) >= horizon,
        )
        for pid, gid, application, database, seconds, xids in rows
    )


def behind(position: str, lsn: str | None) -> int | None:
    """Bytes of WAL between the two; None if `lsn` is not known."""
    return max(0, parse_lsn(position) - parse_lsn(lsn)) if lsn else None


def number(text: str | None) -> float | None:
    return None if text is None else float(text)
