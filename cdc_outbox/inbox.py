"""The worker's side of "at least once": a table, in the worker's own database, of what was done already.

    with connection.transaction():
        if inbox.once(connection, message):
            connection.execute("insert into receipts …")

The claim is a row with (source, id) as its key, written in the transaction of the effect: they commit or vanish
together, and of two workers with the same job the second waits for the first one's end. `sql/inbox.sql` makes the
table. For the worker: it needs nothing of the relay.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, overload
from uuid import UUID

from cdc_outbox.clients import Asynchronous, Caller, InTransaction, NotInTransaction, caller, table_name
from cdc_outbox.stage import as_json

__all__ = ["InTransaction", "Inbox", "NotInTransaction", "message_id", "trim_statement"]

# `on conflict` waits for the transaction that has claimed it and has not ended: it committed, then there is no row;
# it rolled back, then the claim is ours.
_CLAIM = """
insert into {table} (source, id, step) values (cast($1 as text), cast($2 as text), cast($3 as text))
on conflict do nothing
returning 1"""

_STORE = """
update {table} set result = cast($1 as text)::json
where source = cast($2 as text) and id = cast($3 as text) and step = cast($4 as text)
returning 1"""

_STORED = """
select result::text from {table}
where source = cast($1 as text) and id = cast($2 as text) and step = cast($3 as text)"""

# A job's rows stay until the last of them is old enough: its first steps must not be forgotten before its last.
_TRIM = """
with cutoff as (
    select now() - make_interval(secs => cast($1 as text)::float8) as at
), old as (
    select one.ctid from {table} one, cutoff
    where one.done_at < cutoff.at
    and not exists (
        select from {table} other
        where other.source = one.source and other.id = one.id and other.done_at >= cutoff.at
    )
    order by one.done_at
    limit cast($2 as text)::bigint
    for update of one skip locked
), gone as (
    delete from {table} where ctid in (select ctid from old) returning 1
)
select count(*) from gone"""

WHOLE_JOB = ""
"""The step of a job that has none."""


class Inbox:
    """Remembers jobs by (source, id): `id` is the record's header, `source` names the outbox that counts these ids.

    A worker of two outboxes has two inboxes, in one table. Ids start over when an outbox table is made anew: then
    give it a new source, or its first jobs are taken for repeats.
    """

    def __init__(self, source: str = "outbox", *, table: str = "inbox") -> None:
        """`table` as one writes it in SQL: `inbox`, `worker.inbox`. Raises ValueError for anything else."""
        self.source = source
        self._claim = _CLAIM.format(table=table_name(table))
        self._store = _STORE.format(table=table_name(table))
        self._stored = _STORED.format(table=table_name(table))
        self._trim = trim_statement(table)

    @overload
    def once(  # type: ignore[overload-overlap]  # every asynchronous connection is an object too
        self, connection: Asynchronous, message: object
    ) -> Awaitable[bool]: ...
    @overload
    def once(self, connection: object, message: object) -> bool: ...
    def once(self, connection: Any, message: object) -> bool | Awaitable[bool]:
        """Claim a job in the transaction that is open on `connection`: True the first time, False for a repeat.

        While another transaction holds the claim it waits (no longer than the session's `lock_timeout`). Under
        REPEATABLE READ the one that waited in vain gets a serialization failure instead of False.
        `message`: what the consumer returned, its headers, or the id itself. Await the result of an asynchronous
        connection. Raises NotInTransaction: a claim that commits on its own would lose the job in a crash.
        """
        found = caller(connection).execute(self._claim, [self.source, message_id(message), WHOLE_JOB])
        return _claimed(found) if isinstance(found, Awaitable) else bool(found)

    def step(self, connection: Any, message: object, name: str, fn: Callable[[], Any]) -> Any:
        """Do one phase of a job in a transaction of its own, with its result; the result, or the stored one.

        A job that was interrupted goes through its steps again: those that committed return what is stored, without
        calling `fn`. Results are JSON. Whatever `fn` writes on `connection` commits with the claim; what it does
        elsewhere (a payment, a mail) is done again if the worker dies before the commit: give it the job's id as
        idempotency key. Of two workers in the same step, the second waits and gets the first one's result.

        With an asynchronous connection await the result; `fn` may be asynchronous too. Raises InTransaction: a step
        within another transaction would not commit.
        """
        if not name:
            raise ValueError("a step needs a name")
        who = caller(connection)
        key = [self.source, message_id(message), name]
        return self._step_async(who, key, fn) if who.asynchronous else self._step(who, key, fn)

    def _step(self, who: Caller, key: list[str], fn: Callable[[], Any]) -> Any:
        with who.transaction():
            if who.execute(self._claim, key):
                text = as_json(fn(), "result")
                who.execute(self._store, [text, *key])
            else:
                ((text,),) = who.execute(self._stored, key)
        return json.loads(text)

    async def _step_async(self, who: Caller, key: list[str], fn: Callable[[], Any]) -> Any:
        async with who.transaction():
            if await who.execute(self._claim, key):
                result = fn()
                text = as_json(await result if isinstance(result, Awaitable) else result, "result")
                await who.execute(self._store, [text, *key])
            else:
                ((text,),) = await who.execute(self._stored, key)
        return json.loads(text)

    @overload
    def trim(  # type: ignore[overload-overlap]  # every asynchronous connection is an object too
        self, connection: Asynchronous, age_seconds: float, *, batch: int = 10_000
    ) -> Awaitable[int]: ...
    @overload
    def trim(self, connection: object, age_seconds: float, *, batch: int = 10_000) -> int: ...
    def trim(self, connection: Any, age_seconds: float, *, batch: int = 10_000) -> int | Awaitable[int]:
        """Forget at most `batch` rows of jobs whose last step is older than that; how many. Again until it is 0.

        Of every source, in the transaction that is open on `connection`: best one a batch. A repeat that comes later
        is done again, so keep them longer than Kafka keeps the topic.
        """
        found = caller(connection).execute(self._trim, [str(age_seconds), str(batch)])
        return _count(found) if isinstance(found, Awaitable) else int(found[0][0])


async def _claimed(rows: Awaitable[Any]) -> bool:
    return bool(await rows)


async def _count(rows: Awaitable[Any]) -> int:
    return int((await rows)[0][0])


def trim_statement(table: str = "inbox") -> str:
    """For those who have no connection that `Inbox.trim` takes: `$1` is the age in seconds, `$2` the most rows, both
    as text; the number of rows deleted."""
    return _TRIM.format(table=table_name(table))


def message_id(message: object) -> str:
    """The header `id` (`ce_id` with CloudEvents) of a record as confluent-kafka, aiokafka or FastStream give it, or of
    its headers; an id is itself. The first one counts: the relay's own comes before those of the row.

    Raises ValueError if there is none.
    """
    headers: Any = getattr(message, "headers", message)
    if callable(headers):
        headers = headers()
    if isinstance(headers, str | int | UUID):
        return str(headers)
    pairs = headers.items() if isinstance(headers, Mapping) else headers or ()
    for name, value in pairs:
        if name in ("id", "ce_id") and value not in (None, "", b""):
            return value.decode() if isinstance(value, bytes) else str(value)
    raise ValueError("the message has no header id: it does not come from the relay")
