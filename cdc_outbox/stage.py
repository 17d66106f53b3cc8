"""Staging a job: one INSERT on the caller's own connection, so that the job commits, or vanishes, with its data.

    with connection.transaction():
        connection.execute("insert into orders …")
        stage(connection, "send_receipt", {"order": 42})

Plain SQL does the same; this checks what the relay or a worker would choke on later, refuses to write outside a
transaction, and adds the trace context. For the application: it needs nothing of the relay.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, overload

from cdc_outbox.clients import Asynchronous, NotInTransaction, caller, table_name

__all__ = ["Job", "NotInTransaction", "as_json", "stage", "stage_many"]

LONGEST_BYTES = 255
"""Of a task or a key."""
RELAYS_OWN_HEADERS = frozenset({"id", "task", "commit_lsn"})

# One parameter, for one job or a thousand: an array of objects. What an object lacks is SQL NULL; a null in it is the
# value null.
_INSERT = """
insert into {table} (task, args, key, headers)
select job->>'task', job->'args', job->>'key', job->'headers'
from jsonb_array_elements(cast($1 as text)::jsonb) with ordinality as jobs (job, place)
order by place
returning id"""


@dataclass(frozen=True, slots=True)
class Job:
    """What a row of the outbox says. `args` is any JSON: the worker gets it as the record's value.

    `key`: jobs with equal keys stay in order and on one partition; without it, the task's name is the key.
    `headers`: strings that become the record's headers, behind the relay's own.
    """

    task: str
    args: Any
    key: str | None = None
    headers: Mapping[str, str] | None = None


@overload
def stage(
    connection: Asynchronous,
    task: str,
    args: Any,
    *,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    table: str = "outbox",
) -> Awaitable[int]: ...
@overload
def stage(
    connection: object,
    task: str,
    args: Any,
    *,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    table: str = "outbox",
) -> int: ...
def stage(
    connection: Any,
    task: str,
    args: Any,
    *,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    table: str = "outbox",
) -> int | Awaitable[int]:
    """Insert one job in the transaction that is open on `connection`; its id.

    A connection of psycopg 3, asyncpg, SQLAlchemy 2 (a session too) or Django. With an asynchronous one, await the
    result. With a current OpenTelemetry span, `traceparent` and `tracestate` join the headers.

    Raises NotInTransaction where the row would be committed on its own; TypeError for arguments that are not JSON,
    naming the place; ValueError for a task or key that is empty or longer than 255 bytes. Then nothing was sent.
    """
    ids = stage_many(connection, [Job(task, args, key, headers)], table=table)
    return _first(ids) if isinstance(ids, Awaitable) else ids[0]


async def _first(ids: Awaitable[list[int]]) -> int:
    return (await ids)[0]


@overload
def stage_many(  # type: ignore[overload-overlap]  # every asynchronous connection is an object too
    connection: Asynchronous, jobs: Iterable[Job], *, table: str = "outbox"
) -> Awaitable[list[int]]: ...
@overload
def stage_many(connection: object, jobs: Iterable[Job], *, table: str = "outbox") -> list[int]: ...
def stage_many(connection: Any, jobs: Iterable[Job], *, table: str = "outbox") -> list[int] | Awaitable[list[int]]:
    """Insert jobs, in their order and in one round trip; their ids. Otherwise as `stage`."""
    statement = _INSERT.format(table=table_name(table))
    context = _trace_context()
    rows = f"[{','.join(_row(job, context) for job in jobs)}]"
    found = caller(connection).execute(statement, [rows])
    return _awaited(found) if isinstance(found, Awaitable) else _ids(found)


async def _awaited(rows: Awaitable[Iterable[tuple[int]]]) -> list[int]:
    return _ids(await rows)


def _ids(rows: Iterable[tuple[int]]) -> list[int]:
    return [row[0] for row in rows]


def _row(job: Job, context: Mapping[str, str]) -> str:
    """The job as a JSON object; what is absent becomes SQL NULL."""
    parts = {"task": _short("task", job.task), "args": as_json(job.args, "args")}
    if job.key is not None:
        parts["key"] = _short("key", job.key)
    if headers := _headers(job.headers or {}, context):
        parts["headers"] = as_json(headers, "headers")
    return "{" + ",".join(f'"{name}":{text}' for name, text in parts.items()) + "}"


def _short(name: str, value: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is a {type(value).__name__}, not a str")
    text = as_json(value, name)
    if not 0 < len(value.encode()) <= LONGEST_BYTES:
        raise ValueError(f"{name} has {len(value.encode())} bytes; 1 to {LONGEST_BYTES} are allowed")
    return text


def _headers(own: Mapping[str, str], context: Mapping[str, str]) -> dict[str, str]:
    for name, value in own.items():
        if not isinstance(value, str):
            raise TypeError(f"headers.{name} is a {type(value).__name__}, not a str")
        if name in RELAYS_OWN_HEADERS:
            raise ValueError(f"headers.{name} is set by the relay, and a worker must not take yours for it")
    return dict(own) if "traceparent" in own else {**context, **own}


def _trace_context() -> dict[str, str]:
    """Of the current span, as W3C Trace Context has it; empty without one. No span without this module."""
    carrier: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(carrier)
    return carrier


def as_json(value: Any, name: str) -> str:
    """JSON that Postgres takes for jsonb. Raises TypeError or ValueError naming the place, as `args.lines[2].price`;
    never the value, which may be a secret."""
    try:
        _check(value, name)
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply, or holds itself") from None


def _check(value: Any, path: str) -> None:
    match value:
        case None | bool() | int():
            pass
        case str():
            _check_text(value, path)
        case float():
            if not math.isfinite(value):
                raise TypeError(f"{path} is {value}, and JSON has no such number")
        case list() | tuple():
            for place, item in enumerate(value):
                _check(item, f"{path}[{place}]")
        case dict():
            for key, item in value.items():
                if not isinstance(key, str):
                    raise TypeError(f"{path} has a key that is a {type(key).__name__}; keys in JSON are strings")
                _check_text(key, f"a key of {path}")
                _check(item, f"{path}.{key}" if key.isidentifier() else f"{path}[{key!r}]")
        case _:
            raise TypeError(f"{path} is a {type(value).__name__}, and JSON has no such thing")


def _check_text(text: str, path: str) -> None:
    if "\0" in text:
        raise ValueError(f"{path} holds a zero character, which Postgres does not store")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{path} holds half of a surrogate pair, which is no text") from None
