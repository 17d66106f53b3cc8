"""Relays that break one promise each, so that `verify` can be seen to find it.

Python imports this module at its start if this folder is in PYTHONPATH; MUTANT names the fault. So nothing in the
package can be switched off, by a variable or otherwise, and its loop pays nothing for being tested.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from cdc_outbox import purge
from cdc_outbox.inflight import InFlight
from cdc_outbox.objects import Objects
from cdc_outbox.purge import Purge, Seen
from cdc_outbox.query import Queries
from cdc_outbox.session import Session
from cdc_outbox.visibility import VisibilityGate


def gate_off() -> None:
    """What a plain WAL relay does: produce what was decoded, visible or not."""
    VisibilityGate.visible = lambda self, xid: True  # type: ignore[method-assign]


def purge_by_id() -> None:
    """`delete where id <= max(id)`, with the max(id) of what was relayed."""
    look, highest = purge._look, "0"

    def look_for_highest(queries: Queries, objects: Objects, batch: int, most: int) -> Seen:
        nonlocal highest
        highest = queries.call(f"select max(id) from {objects.outbox}", doing="looking")[0][0] or "0"
        return look(queries, objects, batch, most)

    def delete(self: Purge, queries: Queries, objects: Objects, seen: Seen) -> int:
        statement = f"with gone as (delete from {objects.outbox} where id <= $1 returning 1) select count(*) from gone"
        return int(queries.call(statement, [highest], doing="purging")[0][0] or 0)

    purge._look = look_for_highest
    Purge._delete = delete  # type: ignore[method-assign]


def confirm_early() -> None:
    """A position is confirmed once its rows are in the producer's queue."""
    advance = InFlight.advance

    def advance_at_once(self: InFlight) -> Any:
        for transaction in self._transactions:
            transaction.unacknowledged = 0
        return advance(self)

    InFlight.advance = advance_at_once  # type: ignore[method-assign]


def polling() -> None:
    """Asks the table twice a second whether there is something to do."""
    check = Session._check_coverage
    due = 0.0

    def ask_again_and_again(self: Session, now: float) -> float:
        nonlocal due
        if now >= due:
            self.queries.ask(f"select 1 from {self.objects.outbox} limit 1", [], lambda rows: None, "polling")
            due = time.monotonic() + 0.5
        return min(due, check(self, now))

    Session._check_coverage = ask_again_and_again  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[], None]] = {
    function.__name__: function for function in (gate_off, purge_by_id, confirm_early, polling)
}

if name := os.environ.get("MUTANT"):
    MUTANTS[name]()
