"""The SQL connection of those who only look: `status`, `doctor` and the exporter.

Each question stands in a short read-only transaction of its own and gives up by itself, on the server too: a lock on
the table, or a server that answers slowly, must not collect waiting backends. The limits are the transaction's own,
so that behind a pooler they do not stay with the server's session.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from cdc_outbox.errors import OutboxError
from cdc_outbox.query import Queries, Row

SERVER_SECONDS = 3
LOOK_SECONDS = 5.0
"""Longer than the server's own limit: what does not answer by then is frozen, or away."""

_BEGIN = "begin read only"
_LIMITS = (
    f"select set_config('statement_timeout', '{SERVER_SECONDS}s', true), set_config('lock_timeout', '500ms', true)"
)


class Look(Queries):
    """After an error the next question can be asked, unless `lost`."""

    lost = False
    """The connection is of no use any more."""

    def call(
        self, query: str, parameters: Sequence[object] = (), *, doing: str, seconds: float = LOOK_SECONDS
    ) -> list[Row]:
        """As `Queries.call`, in a transaction of its own."""
        call = super().call
        try:
            call(_BEGIN, doing=doing, seconds=seconds)
            call(_LIMITS, doing=doing, seconds=seconds)
            rows = call(query, parameters, doing=doing, seconds=seconds)
            call("commit", doing=doing, seconds=seconds)
        except OutboxError:
            if self.idle:
                with contextlib.suppress(OutboxError):  # what came first is what is told
                    call("rollback", doing=doing, seconds=seconds)
            self.lost = not self.idle
            raise
        return rows
