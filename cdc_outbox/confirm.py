"""Telling Postgres how far it may forget: status updates, each flush position stored in the checkpoint first.

    ledger.confirmable -> outbox_checkpoint (committed) -> status update

Invariants: no flush position is reported that is not stored; none that the server has not sent; it only goes up.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cdc_outbox.backoff import Backoff
from cdc_outbox.checkpoint import store_sql
from cdc_outbox.errors import GapError
from cdc_outbox.inflight import InFlight
from cdc_outbox.lsn import WAL_SEGMENT_BYTES, format_lsn
from cdc_outbox.objects import WAY_BACK, Objects
from cdc_outbox.query import Queries, Row
from cdc_outbox.replication import Replication

CONFIRM_SECONDS = 0.1
"""At most this often is a checkpoint stored. A store is one small fsync; what is not confirmed, a kill repeats."""
STORE_SECONDS = 20.0
"""How long a store may take, behind somebody's lock or a slow disk, before its connection counts as dead."""
POSITION_ASKED_SECONDS = 30.0
"""How long a position that a purge asked for is pursued: the purge has given up by then."""


class Confirmation:
    """When to confirm what. Relayed rows are confirmed at once (every CONFIRM_SECONDS at most). With nothing to
    relay the position moves in steps of one WAL segment, or when a purge asks for it: an idle relay writes nothing.
    """

    def __init__(
        self,
        ledger: InFlight,
        queries: Queries,
        replication: Replication,
        objects: Objects,
        *,
        confirmed: int,
        status_seconds: float,
        on_confirmed: Callable[[int], None],
    ) -> None:
        """`confirmed`: the slot's position at the start, in the checkpoint already."""
        self._ledger = ledger
        self._queries = queries
        self._replication = replication
        self._objects = objects
        self._store = store_sql(objects)
        self._status_seconds = status_seconds
        self._on_confirmed = on_confirmed
        self.confirmed = confirmed
        self._storing = False
        self._next_store = 0.0
        self.status_due = 0.0
        self._wanted = 0
        self._wanted_until = 0.0
        self._ask_server = Backoff(0.01, 1.0)
        self._ask_due = 0.0

    def want(self, position: int) -> None:
        """A purge asks for this position, which may lie beyond the last commit."""
        self._wanted = max(self._wanted, position)
        self._wanted_until = time.monotonic() + POSITION_ASKED_SECONDS
        self._ask_server.reset()
        self._ask_due = 0.0

    @property
    def settled(self) -> bool:
        """Everything acknowledged is confirmed."""
        return not self._storing and self._ledger.relayed <= self.confirmed

    def step(self, received: int, now: float, *, reply: bool = False, urgent: bool = False) -> float:
        """Do what is due; returns when something will be due next (monotonic). Never blocks.

        `received`: the end of WAL that the server has sent; `reply`: it asked for a status update; `urgent`: confirm
        without waiting for CONFIRM_SECONDS.
        """
        due = self._store_if_worth_it(now, urgent=urgent)
        if reply or now >= self.status_due:
            # A reply is asked for each time: its absence is how a dead server is noticed.
            self._status(received, now, reply_requested=True)
        return min(due, self.status_due, self._pursue(received, now))

    def _store_if_worth_it(self, now: float, *, urgent: bool) -> float:
        ledger, confirmed = self._ledger, self.confirmed
        worth_it = (
            ledger.relayed > confirmed
            or ledger.confirmable >= confirmed + WAL_SEGMENT_BYTES
            or confirmed < self._wanted <= ledger.confirmable
        )
        if not worth_it or self._storing:
            return float("inf")  # the answer to a store wakes the loop by itself
        if now < self._next_store and not urgent:
            return self._next_store
        self._storing = True
        self._next_store = now + CONFIRM_SECONDS
        position = ledger.confirmable

        def stored(rows: list[Row]) -> None:
            self._storing = False
            if not rows:
                raise GapError(f"the checkpoint of slot {self._objects.slot} is gone", WAY_BACK)
            self.confirmed = position
            self._status(position, time.monotonic(), reply_requested=False)
            self._on_confirmed(position)

        parameters = [self._objects.slot, format_lsn(position)]
        self._queries.ask(self._store, parameters, stored, "storing the checkpoint", STORE_SECONDS)
        return float("inf")

    def _pursue(self, received: int, now: float) -> float:
        """Lead an idle slot to the wanted position: the server says where it is when it is asked."""
        if not (self.confirmed < self._wanted and self._ledger.confirmable < self._wanted):
            return float("inf")
        if now > self._wanted_until:
            self._wanted = 0
            return float("inf")
        if not self._ledger.idle:
            return float("inf")
        if now >= self._ask_due:
            self._status(received, now, reply_requested=True)
            self._ask_due = now + self._ask_server.next()
        return self._ask_due

    def _status(self, received: int, now: float, *, reply_requested: bool) -> None:
        self._replication.send_status(max(received, self.confirmed), self.confirmed, reply_requested=reply_requested)
        self.status_due = now + self._status_seconds
