"""What Postgres says of the slot, for the exporter: asked when somebody scrapes, never by the relay's thread.

A thread and a connection of its own. A scrape takes a reading that is at most CACHE_SECONDS old, waits PATIENCE_SECONDS
at most for a new one, and not at all while an earlier question is still unanswered: it then gets what is known. With
no scrapes there are no questions.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from cdc_outbox.backlog import Waiting, parse_waiting, waiting_sql
from cdc_outbox.config import Settings
from cdc_outbox.conninfo import complete_conninfo
from cdc_outbox.errors import OutboxError, Stopped
from cdc_outbox.look import Look
from cdc_outbox.lsn import parse_lsn
from cdc_outbox.objects import resolve
from cdc_outbox.wakeup import Wakeup

log = logging.getLogger("cdc_outbox.slot_watch")

CACHE_SECONDS = 3.0
PATIENCE_SECONDS = 0.25
UNTOLD_SECONDS = 60.0
"""How long to ask nothing of a table that did not answer: it is locked, or full of dead rows that nothing may clear."""
MISSING = "missing"

# A lost slot has nothing left; without a limit (NULL, slot alive) it has all the WAL in the world.
_SLOT = """
select s.wal_status, s.active::int, greatest(pg_wal_lsn_diff(w.position, s.restart_lsn), 0)::bigint,
       case when s.wal_status = 'lost' then 0 else coalesce(s.safe_wal_size, 'infinity'::float8) end,
       s.confirmed_flush_lsn, w.position
from (select case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_lsn() end as position) w
left join pg_replication_slots s on s.slot_name = $1"""


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer. `at` is Unix time; `waiting_since` is monotonic: since when, at most, a row has been waiting to be
    confirmed; None if none was."""

    at: float
    wal_status: str
    active: bool
    retained_bytes: int
    safe_bytes: float
    """Infinity where the server sets no limit."""
    confirmed_flush_lsn: int
    wal_position: int
    waiting_since: float | None


class SlotWatch:
    """`reading` is for any thread; `close` ends the watch's own."""

    def __init__(self, settings: Settings) -> None:
        """Connects when it is first asked. Raises ConfigError."""
        self._settings = settings
        self._conninfo = complete_conninfo(settings.dsn)
        self._wakeup = Wakeup()
        self._changed = threading.Condition()
        self._wanted = False
        self._tried = float("-inf")
        self._known: Reading | None = None
        self._look: Look | None = None
        self._waiting_sql: str | None = None
        self._waiting_due = self._nothing_waited = float("-inf")
        self._said = ""
        self._thread = threading.Thread(target=self._run, name="slot-watch", daemon=True)
        self._thread.start()

    def reading(self) -> Reading | None:
        """The newest there is; None before the first. Returns within PATIENCE_SECONDS."""
        with self._changed:
            if not self._wanted and time.monotonic() - self._tried >= CACHE_SECONDS:
                self._wanted = True
                self._wakeup.nudge()
                self._changed.wait_for(lambda: not self._wanted, PATIENCE_SECONDS)
            return self._known

    def close(self) -> None:
        self._wakeup.stop()
        self._thread.join(2.0)
        if not self._thread.is_alive():
            self._wakeup.close()

    def _run(self) -> None:
        while not self._wakeup.stop_requested:
            if self._wanted:
                self._answer()
            else:
                self._wakeup.wait((), 3600.0)
        self._disconnect()

    def _answer(self) -> None:
        found = None
        try:
            found = self._read()
            self._said = ""
        except OutboxError as error:
            self._disconnect()
            if str(error) != self._said and not isinstance(error, Stopped):  # once, not once a scrape
                self._said = str(error)
                log.warning("metrics: the slot cannot be read: %s", error)
        with self._changed:
            self._known = found or self._known
            self._tried = time.monotonic()
            self._wanted = False
            self._changed.notify_all()

    def _read(self) -> Reading:
        look = self._look = self._look or Look(self._conninfo, self._wakeup)
        mono = time.monotonic()
        row = look.call(_SLOT, [self._settings.slot], doing="reading pg_replication_slots")[0]
        status, active, retained, safe, confirmed, position = row
        return Reading(
            at=time.time(),
            wal_status=MISSING if active is None else status or "lost",
            active=active == "1",
            retained_bytes=int(retained or 0),
            safe_bytes=float(safe or 0) if active is not None else 0.0,
            confirmed_flush_lsn=parse_lsn(confirmed) if confirmed else 0,
            wal_position=parse_lsn(position) if position else 0,
            waiting_since=self._waiting_since(self._read_waiting(look), mono),
        )

    def _read_waiting(self, look: Look) -> Waiting | None:
        """None if it cannot be told: no such table, no privilege, the table is locked."""
        if time.monotonic() < self._waiting_due:
            return None
        try:
            if self._waiting_sql is None:
                settings = self._settings
                objects = resolve(look, settings.table, settings.slot, settings.publication)
                self._waiting_sql = waiting_sql(look, objects) if objects is not None else None
            if self._waiting_sql is None:
                return None
            return parse_waiting(look.call(self._waiting_sql, doing="looking for rows that wait")[0])
        except OutboxError:
            if look.lost:
                raise
            self._waiting_sql = None
            self._waiting_due = time.monotonic() + UNTOLD_SECONDS
            return None

    def _disconnect(self) -> None:
        if self._look is not None:
            self._look.close()
        self._look = self._waiting_sql = None

    def _waiting_since(self, found: Waiting | None, mono: float) -> float | None:
        before = self._known.waiting_since if self._known is not None else None
        if found is None:
            return before
        if not found.waits:
            self._nothing_waited = mono
            return None
        if found.seconds is None:
            return mono if before is None else before
        return max(mono - found.seconds, self._nothing_waited)
