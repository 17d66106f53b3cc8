"""Deleting rows that Kafka has: exactly those, without a flag, an id or a memory of what was sent.

In one REPEATABLE READ transaction the first statement fixes a snapshot and reads L, the end of the WAL. Every row
visible in it was committed below L. Once the slot is confirmed up to L, every visible row has been acknowledged; so
the DELETE under that same snapshot removes rows that were relayed, and no other. True after any restart.

L lies past the last row's commit, so an idle slot must be led there: the purge sends a NOTIFY to the relay's SQL
connection. Its commit also flushes the WAL up to L. The purge knows nothing else of the relay.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from cdc_outbox.backoff import Backoff
from cdc_outbox.checkpoint import check_now
from cdc_outbox.errors import GapError, OutboxError, Stopped
from cdc_outbox.lsn import format_lsn, parse_lsn
from cdc_outbox.metrics import Figures
from cdc_outbox.objects import Objects, require, require_slot
from cdc_outbox.query import Queries
from cdc_outbox.wakeup import Wakeup

log = logging.getLogger("cdc_outbox.purge")

REACH_SECONDS = 5.0
"""How long a round waits for the slot; a longer snapshot would hold vacuum back."""
LOCK_TIMEOUT = "1s"
LONGEST_PAUSE_SECONDS = 60.0
BATCHES = 20
"""Deletes in one round: a snapshot stays open for a few seconds at most."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did. `left`: visible rows that stay for a later round (locked by others, or too many)."""

    deleted: int
    left: bool
    reached: bool


class Purge:
    """Two connections: one holds the snapshot, the other sees the present."""

    def __init__(self, conninfo: str, wakeup: Wakeup, *, table: str, slot: str, publication: str, batch: int) -> None:
        """Raises ConnectionLost, PreconditionError."""
        self._wakeup = wakeup
        self._batch = batch
        self._snapshot = Queries(conninfo, wakeup)
        try:
            self._present = Queries(conninfo, wakeup)
        except OutboxError:
            self._snapshot.close()
            raise
        for queries in (self._snapshot, self._present):
            # Not one of these commits has to wait for a synchronous standby.
            queries.call("set synchronous_commit = local", doing="preparing the purge")
            queries.call(f"set lock_timeout = '{LOCK_TIMEOUT}'", doing="preparing the purge")
        self._objects: Objects = require(self._present, table, slot, publication)

    def close(self) -> None:
        self._snapshot.close()
        self._present.close()

    def round(self, *, dry_run: bool = False) -> Round:
        """Raises GapError if the slot cannot be believed: then nothing is deleted."""
        check_now(self._present, self._objects)
        call = self._snapshot.call
        call("begin isolation level repeatable read", doing="purging")
        ended = False
        try:
            fence = parse_lsn(call("select pg_current_wal_insert_lsn()", doing="purging")[0][0] or "")
            if not self._rows_left():
                return Round(0, left=False, reached=True)
            if not self._reach(fence):
                return Round(0, left=True, reached=False)
            # Again, now that the slot has moved: first the slot was read, and now the checkpoint behind it.
            check_now(self._present, self._objects)
            deleted = self._count() if dry_run else self._delete()
            left = self._rows_left()
            call("commit", doing="purging")
            ended = True
            return Round(deleted, left=left, reached=True)
        finally:
            if not ended:
                self._roll_back()

    def _reach(self, fence: int) -> bool:
        """Wait until the slot is confirmed up to `fence`."""
        self._present.call(
            "select pg_notify($1, $2)", [self._objects.slot, format_lsn(fence)], doing="asking for a position"
        )
        deadline = time.monotonic() + REACH_SECONDS
        backoff = Backoff(0.005, 0.2)
        while True:
            if require_slot(self._present, self._objects.slot).confirmed_flush_lsn >= fence:
                return True
            if time.monotonic() > deadline or self._wakeup.stop_requested:
                return False
            self._wakeup.wait((), backoff.next())

    def _delete(self) -> int:
        """Rows that others have locked are left for a later round."""
        outbox = self._objects.outbox
        statement = (
            f"with relayed as materialized (select tableoid, ctid from {outbox} limit $1 for update skip locked),"
            f" purged as (delete from {outbox} o using relayed r"
            " where o.tableoid = r.tableoid and o.ctid = r.ctid returning 1)"
            " select count(*) from purged"
        )
        total = 0
        for _ in range(BATCHES):
            deleted = int(self._snapshot.call(statement, [self._batch], doing="purging")[0][0] or 0)
            total += deleted
            if deleted < self._batch or self._wakeup.stop_requested:
                break
        return total

    def _count(self) -> int:
        rows = self._snapshot.call(f"select count(*) from {self._objects.outbox}", doing="counting")
        return int(rows[0][0] or 0)

    def _rows_left(self) -> bool:
        rows = self._snapshot.call(f"select exists (select from {self._objects.outbox})", doing="purging")
        return rows[0][0] == "t"

    def _roll_back(self) -> None:
        """Whatever happened, the snapshot must not stay open."""
        try:
            self._snapshot.call("rollback", doing="ending the purge's snapshot")
        except OutboxError as error:
            log.debug("%s", error)


class PurgeThread:
    """Purges beside a relay, in a thread and on connections of its own; sleeps until something was relayed."""

    def __init__(
        self,
        make: Callable[[Wakeup], Purge],
        every: float,
        figures: Figures,
        fail: Callable[[OutboxError], None],
    ) -> None:
        """`fail` is told of a GapError: the relay must not go on either."""
        self._make = make
        self._every = every
        self._figures = figures
        self._fail = fail
        self._wakeup = Wakeup()
        self._relayed = False
        self._thread = threading.Thread(target=self._run, name="purge", daemon=True)
        self._thread.start()

    def relayed(self) -> None:
        """There may be something to purge; for the relay's thread, cheap."""
        if not self._relayed:
            self._relayed = True
            self._wakeup.nudge()

    def close(self) -> None:
        self._wakeup.stop()
        self._thread.join(REACH_SECONDS)

    def _run(self) -> None:
        purge: Purge | None = None
        pause = Backoff(self._every, max(self._every, LONGEST_PAUSE_SECONDS))
        again = False
        said = ""
        while not self._wakeup.stop_requested:
            if not self._relayed and not again:
                self._wakeup.wait((), LONGEST_PAUSE_SECONDS)
                continue
            if self._relayed:
                pause.reset()
            self._pause(pause.next())
            self._relayed = False
            try:
                purge = purge or self._make(self._wakeup)
                done = purge.round()
                self._figures.purged_rows += done.deleted
                again, said = done.left, ""
            except Stopped:
                break
            except OutboxError as error:
                if purge is not None:
                    purge.close()
                    purge = None
                if isinstance(error, GapError):
                    self._fail(error)
                again = True
                if str(error) != said:  # once, not once a round
                    said = str(error)
                    log.warning("purge: %s%s", error, f" ({error.hint})" if error.hint else "")
        if purge is not None:
            purge.close()

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._wakeup.stop_requested and (left := deadline - time.monotonic()) > 0:
            self._wakeup.wait((), left)
