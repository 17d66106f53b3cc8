"""How far a statement is that writes many rows of the outbox: a requeue, a replay.

What it writes nobody sees before it commits; but its table grows, which anyone can see. So the number is an estimate,
and there is none as long as the rows find room that was free.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cdc_outbox import progress
from cdc_outbox.errors import OutboxError
from cdc_outbox.look import Look
from cdc_outbox.objects import Objects
from cdc_outbox.wakeup import Wakeup

_BYTES = """
select sum(pg_relation_size(relid))
from (select $1::oid::regclass as relid union select relid from pg_partition_tree($1::oid::regclass)) t"""


@contextlib.contextmanager
def shown(conninfo: str, objects: Objects, what: str, rows: int, bytes_a_row: float | None = None) -> Iterator[None]:
    """Meanwhile show it, on a connection of its own. `bytes_a_row`: by default as many as the table has."""
    if not progress.wanted() or not rows:
        yield
        return
    with contextlib.closing(Look(conninfo, Wakeup())) as look:
        before = _bytes(look, objects)
        expected = rows * bytes_a_row if bytes_a_row is not None else before

        def text(seconds: float) -> str:
            grown = _bytes(look, objects) - before
            if grown <= 0 or not expected:
                return f"{what} {rows:,} rows, {progress.time_left(seconds)} so far"
            share = min(grown / expected, 0.99)
            return progress.sentence(f"{what} about", int(rows * share), seconds, of=rows, share=share)

        with progress.shown(text):
            yield


def _bytes(look: Look, objects: Objects) -> int:
    """0 if it cannot be told: nobody fails for a line that is not shown."""
    try:
        return int(look.call(_BYTES, [objects.oid], doing="measuring the table")[0][0] or 0)
    except OutboxError:
        return 0
