"""What `status` makes of what Postgres answers."""

from typing import Any

import pytest

from cdc_outbox.query import Row
from cdc_outbox.status_report import Lag, SlotState, Status, open_transactions, slot_state, wal_state
from cdc_outbox.status_text import duration, lines, size

MB = 1024**2


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 kB"), (1.5 * MB, "1.5 MB"), (3 * 1024**4, "3.0 TB")],
)
def test_sizes_are_written_as_postgres_writes_them(count: float, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.96, "10.0 s"), (61, "61 s"), (7199, "119 min"), (7260, "2 h 1 min"), (200_000, "2 d 7 h")],
)
def test_durations_have_two_figures_that_matter(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def left(state: str = "active", **changes: Any) -> float | None:
    slot = SlotState("s", state, restart_lsn="0/100", confirmed_flush_lsn="0/200", inactive_seconds=20.0)
    given: dict[str, Any] = {"left": 10 * MB, "limit": 64 * MB, "written": (100.0, 100.0 * MB), "idle_timeout": None}
    return wal_state(slot, "0/300", **{**given, **changes}).seconds_left


def test_the_time_until_the_slot_is_lost_is_what_is_left_over_the_rate() -> None:
    assert left() == 10
    assert left("inactive") == 10
    assert left("lost") == 0
    assert left(left=None) is None  # no limit
    assert left(written=(100.0, 0.0)) is None  # nothing is being written
    assert left(written=(0.5, 1.0)) is None  # the last checkpoint was just now
    assert left(written=None) is None  # it may not be seen


def test_the_wal_held_and_the_limit() -> None:
    slot = SlotState("s", "inactive", restart_lsn="0/100", confirmed_flush_lsn="0/200", inactive_seconds=20.0)
    wal = wal_state(slot, "0/300", left=None, limit=-1, written=None, idle_timeout=30)
    assert (wal.held_bytes, wal.limit_bytes, wal.left_bytes, wal.idle_seconds_left) == (0x200, None, None, 10)
    gone = wal_state(slot, "0/300", left=None, limit=-1, written=None, idle_timeout=5)
    assert gone.idle_seconds_left == 0
    off = wal_state(slot, "0/300", left=None, limit=-1, written=None, idle_timeout=0)
    assert off.idle_seconds_left is None


SLOT = {
    "slot_type": "logical",
    "plugin": "pgoutput",
    "database": "app",
    "temporary": False,
    "two_phase": False,
    "active_pid": None,
    "held_by": "pid  (no name, local)",
    "wal_status": "reserved",
    "restart_lsn": "0/100",
    "confirmed_flush_lsn": "0/200",
    "sent_lsn": None,
    "inactive_seconds": None,
}


@pytest.mark.parametrize(
    ("changes", "state", "reason"),
    [
        ({}, "inactive", None),
        ({"active_pid": 7}, "active", None),
        ({"wal_status": "lost", "restart_lsn": None}, "lost", "wal_removed"),
        ({"wal_status": "lost", "invalidation_reason": "idle_timeout"}, "lost", "idle_timeout"),
        ({"plugin": "test_decoding", "active_pid": 7}, "foreign", None),
        ({"database": "other"}, "foreign", None),
    ],
)
def test_the_state_of_a_slot(changes: dict[str, Any], state: str, reason: str | None) -> None:
    found = slot_state("s", {**SLOT, **changes}, "app")
    assert (found.state, found.invalidation_reason) == (state, reason)
    assert (found.problem is not None) is (state == "foreign")
    assert (found.held_by is not None) is bool(found.active_pid)
    assert slot_state("s", {}, "app").state == "missing"


def next_step(state: str, *, in_recovery: bool = False) -> str | None:
    slot = SlotState("s", state, problem="the reason", held_by="pid 7", invalidation_reason="wal_removed")
    wal = wal_state(slot, "0/300", left=None, limit=-1, written=None, idle_timeout=None)
    found = Status("now", "18.6", "app", in_recovery, slot, Lag(None, None), wal, (), None, None, None, ())
    steps = [line[14:] for line in lines(found) if line.startswith("next")]
    return steps[0] if steps else None


def test_each_state_that_is_not_well_says_what_comes_next() -> None:
    assert next_step("active") is None
    assert "init-slot" in (next_step("missing") or "")
    assert "init-slot" in (next_step("lost") or "")
    assert "--slot" in (next_step("foreign") or "")
    assert "cdc-outbox stream" in (next_step("inactive") or "")
    assert "the primary's address" in (next_step("missing", in_recovery=True) or "")


@pytest.mark.parametrize(
    ("xids", "horizon", "restart", "holds"),
    [
        (40, 42, "0/100", True),  # as old as all that the slot must keep
        (40, 42, "0/5000000", False),  # the slot is not behind
        (2, 5000, "0/100", False),  # a busy server: this one began just now
        (40, None, "0/100", False),  # a lost slot holds nothing
    ],
)
def test_which_transaction_holds_the_slot_back(xids: int, horizon: int | None, restart: str, holds: bool) -> None:
    row: Row = ("815", None, "psql", "app", "3.5", str(xids))
    slot = {"confirmed_flush_lsn": "0/5000000", "restart_lsn": restart, "catalog_xmin_age": horizon}
    (one,) = open_transactions([row], slot)
    assert (one.pid, one.application, one.seconds, one.holds) == (815, "psql", 3.5, holds)
    (unknown,) = open_transactions([(None, "gid", None, "app", None, "1")], slot)
    assert (unknown.pid, unknown.prepared, unknown.seconds) == (None, "gid", None)
