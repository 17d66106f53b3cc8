"""What `status` found, as lines for people."""

from __future__ import annotations

from cdc_outbox.objects import WAY_BACK
from cdc_outbox.status_report import OpenTransaction, Status, TableState


def lines(status: Status) -> list[str]:
    pairs = [
        ("slot", _slot(status)),
        ("next", _next(status)),
        ("confirmed", _confirmed(status)),
        ("WAL held", _held(status)),
        *(("held back by", transaction(one)) for one in status.transactions if one.holds),
        ("WAL left", _left(status)),
        ("", _idle(status)),
        ("outbox", _table(status.outbox, "about ") if status.outbox else None),
        ("dead letters", _table(status.dead_letters) if status.dead_letters else None),
        ("archive", _table(status.archive, "about ") if status.archive else None),
        *(("not seen", what) for what in status.unseen),
    ]
    return [f"{name:<14}{text}" for name, text in pairs if text is not None]


def _slot(status: Status) -> str:
    slot = status.slot
    where = f"{slot.name} (database {status.database}, PostgreSQL {status.server_version}, {status.at})"
    match slot.state:
        case "missing" | "foreign":
            return f"{where}: {slot.problem}"
        case "lost":
            return f"{where}: lost ({slot.invalidation_reason})"
        case "active":
            return f"{where}: active, held by {slot.held_by}; wal_status {slot.wal_status}"
        case _:
            since = f" for {duration(slot.inactive_seconds)}" if slot.inactive_seconds is not None else ""
            return f"{where}: inactive{since}, no relay reads it; wal_status {slot.wal_status}"


def _next(status: Status) -> str | None:
    if status.in_recovery:
        return "this server is a standby: give the primary's address with --dsn"
    match status.slot.state:
        case "missing" | "lost":
            return WAY_BACK
        case "foreign":
            return "choose another name with --slot"
        case "inactive":
            return "start `cdc-outbox stream`; for what keeps it from running, `cdc-outbox doctor`"
        case _:
            return None


def _confirmed(status: Status) -> str | None:
    if status.slot.confirmed_flush_lsn is None:
        return None
    wait = ""
    if status.lag.seconds is not None:
        wait = f"; a row has waited up to {duration(status.lag.seconds)}" if status.lag.seconds else "; no row waits"
    return f"{status.slot.confirmed_flush_lsn}, {size(status.lag.bytes or 0)} behind {status.wal.position}{wait}"


def _held(status: Status) -> str | None:
    if status.wal.held_bytes is None:
        return None
    return f"{size(status.wal.held_bytes)}, from {status.slot.restart_lsn}"


def _left(status: Status) -> str | None:
    wal = status.wal
    if status.slot.state not in ("active", "inactive"):
        return None
    rate = ""
    if wal.bytes_per_second is not None:
        window = f"at {size(wal.bytes_per_second)}/s, the rate of the last {duration(wal.rate_seconds or 0)}"
        rate = f"; {duration(wal.seconds_left)} {window}" if wal.seconds_left is not None else f"; {window}"
    if wal.left_bytes is None:
        return f"no limit but the disk (max_slot_wal_keep_size is -1){rate}"
    return f"{size(wal.left_bytes)} before the slot is lost{rate}"


def _idle(status: Status) -> str | None:
    left = status.wal.idle_seconds_left
    return None if left is None else f"{duration(left)} before idle_replication_slot_timeout takes the slot"


def transaction(one: OpenTransaction) -> str:
    who = f"prepared transaction {one.prepared}" if one.prepared is not None else f"pid {one.pid}"
    where = ", ".join(filter(None, [one.application, f"database {one.database}"]))
    age = (
        f"open for {duration(one.seconds)}" if one.seconds is not None else "open for as long as this role may not see"
    )
    return f"{who} ({where}), {age}, {one.xids:,} transactions began since"


def _table(table: TableState, about: str = "") -> str:
    oldest = f", the oldest {duration(table.oldest_seconds)} old" if table.oldest_seconds is not None else ""
    return f"{table.name}: {about}{table.rows:,} rows, {size(table.bytes)}{oldest}"


def size(count: float) -> str:
    """As pg_size_pretty names them, with one decimal."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min`, `2 h 5 min`, `4 d 3 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
