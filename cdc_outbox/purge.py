"""Deleting rows that Kafka has: exactly those, without a flag, an id or a memory of what was sent.

One statement, so one snapshot, finds rows of the table and then L, the end of the WAL. Every transaction whose rows it
sees was committed below L. Once the slot is confirmed up to L, each of their rows has been acknowledged; so deleting
rows whose xmin that snapshot saw removes rows that were relayed, and no other. True after any restart.

No snapshot and no lock is held meanwhile, and each batch is a transaction of its own. A ctid says where to look, the
xmin is the proof: what another purge, an update, a VACUUM FULL or a new row has put there since has another xmin, or
one that was seen too.

L lies past the last row's commit, so an idle slot must be led there: the purge sends a NOTIFY to the relay's SQL
connection. Its commit also flushes the WAL up to L. The purge knows nothing else of the relay.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cdc_outbox.archive import TRIM, deleting
from cdc_outbox.backoff import Backoff
from cdc_outbox.checkpoint import check_now
from cdc_outbox.errors import GapError, OutboxError, PreconditionError, Stopped
from cdc_outbox.lsn import format_lsn, parse_lsn
from cdc_outbox.metrics import Figures
from cdc_outbox.objects import Objects, published, require, require_slot
from cdc_outbox.query import Queries, Row
from cdc_outbox.wakeup import Wakeup

log = logging.getLogger("cdc_outbox.purge")

REACH_SECONDS = 5.0
"""How long a round waits for the slot."""
LONGEST_PAUSE_SECONDS = 60.0
BATCHES = 20
"""Deletes in one round, for whose rows the snapshot looks."""

# For one transaction, since a pooler may give the next one to another session. No commit waits for a synchronous
# standby; no lock is waited for long, behind which an ALTER TABLE and all inserts would wait; and a server's limit for
# the statements of applications is none for ours, which are bounded by their rows.
_LIMITS = """
select set_config('synchronous_commit', 'local', true), set_config('lock_timeout', '1s', true),
       set_config('statement_timeout', '20s', true)"""

# The functions of the target list are called after the statement has taken its snapshot.
_LOOK = """
select pg_current_wal_insert_lsn(), count(*), array_agg(ctid), array_agg(xmin),
       (select json_agg(attname order by attnum) from pg_attribute
        where attrelid = $3::oid and attnum > 0 and not attisdropped)
from (select ctid, xmin, (row_number() over () - 1) / $1::int as batch from {outbox} where {ours} limit $2::int) seen
group by batch"""


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did. `left`: rows that it saw stay for a later round, since others have locked them or the slot
    is not there yet. `more`: there may be rows that it did not look for."""

    deleted: int
    left: bool
    reached: bool
    more: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """Rows that one snapshot saw, in batches, and the WAL position behind all of them. The arrays as Postgres prints
    them: nobody here needs to know what is in them."""

    fence: int
    rows: int
    batches: Sequence[tuple[str, str]]
    columns: Sequence[str]


class Purge:
    """One connection, made when it is needed and given up after a failure, which ends that round only."""

    def __init__(
        self,
        conninfo: str,
        wakeup: Wakeup,
        *,
        table: str,
        slot: str,
        publication: str,
        batch: int,
        archive: bool = False,
        archive_retain: float | None = None,
    ) -> None:
        """`archive`: move the rows to the archive instead; `archive_retain`: seconds for which they stay there."""
        self._conninfo = conninfo
        self._wakeup = wakeup
        self._names = (table, slot, publication)
        self._batch = batch
        self._archive = archive
        self._retain = archive_retain
        self._queries: Queries | None = None

    def close(self) -> None:
        if self._queries is not None:
            self._queries.close()
            self._queries = None

    def round(self, *, dry_run: bool = False) -> Round:
        """Raises GapError if the slot cannot be believed: then nothing is deleted. After any error that says
        `retry`, the next round is a new beginning."""
        try:
            if self._queries is None:
                self._queries = Queries(self._conninfo, self._wakeup)
                self._objects: Objects = require(self._queries, *self._names)
            return self._round(self._queries, self._objects, dry_run)
        except OutboxError:
            self.close()
            raise

    def _round(self, queries: Queries, objects: Objects, dry_run: bool) -> Round:
        check_now(queries, objects)
        # All of them, or what one round deletes.
        most = 1 << 30 if dry_run else self._batch * BATCHES
        seen = _look(queries, objects, self._batch, most)
        deleted, reached = 0, True
        if seen.rows:
            reached = self._reach(queries, objects, seen.fence)
            if reached:
                # Again, now that the slot has moved: first the slot was read, and now the checkpoint behind it.
                check_now(queries, objects)
                deleted = seen.rows if dry_run else self._delete(queries, objects, seen)
        if self._retain is not None and not dry_run:
            self._trim(queries, objects, self._retain)
        return Round(deleted, left=deleted < seen.rows, reached=reached, more=seen.rows == most and deleted > 0)

    def _reach(self, queries: Queries, objects: Objects, fence: int) -> bool:
        """Wait until the slot is confirmed up to `fence`."""
        notify = "select pg_notify($1, $2)"
        _transaction(queries, notify, [objects.slot, format_lsn(fence)], "asking for a position")
        deadline = time.monotonic() + REACH_SECONDS
        backoff = Backoff(0.005, 0.2)
        while True:
            if require_slot(queries, objects.slot).confirmed_flush_lsn >= fence:
                return True
            if time.monotonic() > deadline or self._wakeup.stop_requested:
                return False
            self._wakeup.wait((), backoff.next())

    def _delete(self, queries: Queries, objects: Objects, seen: Seen) -> int:
        """Rows that others have locked are left for a later round."""
        statement = deleting(objects, seen.columns if self._archive else None)
        deleted = 0
        try:
            for batch in seen.batches:
                deleted += int(_transaction(queries, statement, batch, "purging")[0][0] or 0)
                if self._wakeup.stop_requested:
                    break
        except PreconditionError as error:
            if self._archive and not error.hint:
                error.hint = "run `cdc-outbox init-slot`: it makes the archive, or adds the columns that it lacks"
            raise
        return deleted

    def _trim(self, queries: Queries, objects: Objects, seconds: float) -> None:
        statement = TRIM.format(archive=objects.archive)
        for _ in range(BATCHES):
            trimmed = _transaction(queries, statement, [seconds, self._batch], "trimming the archive")
            if int(trimmed[0][0] or 0) < self._batch or self._wakeup.stop_requested:
                break


def _look(queries: Queries, objects: Objects, batch: int, most: int) -> Seen:
    look = _LOOK.format(outbox=objects.outbox, ours=published(queries, objects))
    rows = _transaction(queries, look, [batch, most, objects.oid], "looking for rows")
    return Seen(
        fence=max((parse_lsn(row[0] or "") for row in rows), default=0),
        rows=sum(int(row[1] or 0) for row in rows),
        batches=[(row[2] or "", row[3] or "") for row in rows],
        columns=json.loads(rows[0][4] or "[]") if rows else [],
    )


def _transaction(queries: Queries, statement: str, parameters: Sequence[object], doing: str) -> list[Row]:
    """One statement in a transaction of its own. Whoever fails in it closes the connection."""
    queries.call("begin", doing=doing)
    queries.call(_LIMITS, doing=doing)
    rows = queries.call(statement, parameters, doing=doing)
    queries.call("commit", doing=doing)
    return rows


class PurgeThread:
    """Purges beside a relay, in a thread and on a connection of its own; sleeps until something was relayed."""

    def __init__(
        self,
        make: Callable[[Wakeup], Purge],
        every: float,
        figures: Figures,
        fail: Callable[[OutboxError], None],
    ) -> None:
        """`fail` is told of a GapError, and of what nobody expected: the relay must not go on either."""
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
        try:
            self._purge()
        except Exception as error:  # the top of this thread: without it rows would pile up, and nobody know
            self._fail(OutboxError(f"purge: unexpected {type(error).__name__}: {error}", "please report it"))

    def _purge(self) -> None:
        purge = self._make(self._wakeup)
        pause = Backoff(self._every, max(self._every, LONGEST_PAUSE_SECONDS))
        again = more = False
        said = ""
        while not self._wakeup.stop_requested:
            if not self._relayed and not again:
                self._wakeup.wait((), LONGEST_PAUSE_SECONDS)
                continue
            if self._relayed:
                pause.reset()
            if not more:
                self._pause(pause.next())
            self._relayed = more = False
            try:
                done = purge.round()
                self._figures.purged(done.deleted)
                again, more, said = done.left or done.more, done.more, ""
            except Stopped:
                break
            except OutboxError as error:
                self._figures.note(error)
                if isinstance(error, GapError):
                    self._fail(error)
                again = True
                if str(error) != said:  # once, not once a round
                    said = str(error)
                    log.warning("purge: %s%s", error, f" ({error.hint})" if error.hint else "")
        purge.close()

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._wakeup.stop_requested and (left := deadline - time.monotonic()) > 0:
            self._wakeup.wait((), left)
