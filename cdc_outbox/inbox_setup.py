"""`init-inbox` and `inbox-trim`: the worker's table from the command line; workers themselves use `Inbox`."""

from __future__ import annotations

from cdc_outbox.config import Settings
from cdc_outbox.conninfo import complete_conninfo
from cdc_outbox.inbox import trim_statement
from cdc_outbox.objects import table_to_be
from cdc_outbox.query import Queries
from cdc_outbox.statements import qualified, statements
from cdc_outbox.wakeup import Wakeup

TRIM_BATCH = 10_000
"""Rows forgotten in one transaction."""


def make_inbox(settings: Settings, wakeup: Wakeup, table: str) -> str:
    """Create `sql/inbox.sql` under the name `table` where it is missing; says what happened."""
    queries = Queries(complete_conninfo(settings.dsn), wakeup)
    try:
        schema, name = table_to_be(queries, table)
        inbox = qualified(schema, name)
        if queries.call("select to_regclass($1)", [inbox], doing="looking for the inbox")[0][0] is not None:
            return f"inbox: {inbox} was there"
        names = {"schema": schema, "inbox": name, "inbox_done_at": f"{name}_done_at"}
        for statement in statements("inbox.sql", names):
            queries.call(statement, doing="creating the inbox")
        return f"inbox: {inbox} created"
    finally:
        queries.close()


def trim_inbox(settings: Settings, wakeup: Wakeup, table: str, age: float) -> int:
    """Rows forgotten, in batches that are each a transaction of their own."""
    queries = Queries(complete_conninfo(settings.dsn), wakeup)
    forgotten = 0
    try:
        while True:
            rows = queries.call(trim_statement(table), [age, TRIM_BATCH], doing="trimming the inbox")
            count = int(rows[0][0] or 0)
            forgotten += count
            if count < TRIM_BATCH:
                return forgotten
    finally:
        queries.close()
