"""The caller's connection, whichever client library it comes from: one statement on it, in the caller's transaction.

The package depends on none of these libraries and imports none. Whoever holds a connection of one has imported it, so
it is in `sys.modules`; which one it is, the class of the connection says.

Statements have `$1`, `$2`, … once each, in this order and each inside `cast($n as text)`: the one form that every
library passes on unchanged, whatever codecs the application has set for json or other types.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Sequence
from types import ModuleType
from typing import Any, Protocol

_PARAMETER = re.compile(r"\$(\d)")
_NAME = r'(?:[^\W\d]\w*|"[^"$%:\0]+")'  # no character that some library would take for a parameter
_TABLE = re.compile(rf"{_NAME}(?:\.{_NAME})?")


class NotInTransaction(Exception):
    """The connection has no transaction open: what is written now would be committed on its own."""


class InTransaction(Exception):
    """The connection has a transaction open, and this needs one of its own."""


class Asynchronous(Protocol):
    """What type checkers know an asynchronous connection by, of whichever library."""

    def execute(self, *args: Any, **kwargs: Any) -> Awaitable[Any]: ...


class Caller(Protocol):
    """A connection. What an asynchronous one returns is awaited, and its transaction is entered, with `async`."""

    asynchronous: bool

    def execute(self, statement: str, parameters: Sequence[str | None]) -> Any:
        """The rows. Raises NotInTransaction."""

    def transaction(self) -> Any:
        """A context manager that begins a transaction and ends it. Raises InTransaction if one is open."""


def caller(connection: object) -> Caller:
    """Raises TypeError for anything else than a connection."""
    for kind in type(connection).__mro__:
        match kind.__module__.partition(".")[0]:
            case "psycopg":
                return _Psycopg(connection)
            case "asyncpg":
                return _Asyncpg(connection)
            case "sqlalchemy":
                return _SQLAlchemy(connection)
            case "django":
                return _Django(connection)
    raise not_a_connection(connection)


def table_name(name: str) -> str:
    """`outbox`, `app.outbox` or `"Outbox"`, as one writes it in SQL; nothing else can be in it. Raises ValueError."""
    if not _TABLE.fullmatch(name):
        raise ValueError(f"{name!r} is no table's name: write it as in SQL, NAME or SCHEMA.NAME")
    return name


def not_a_connection(found: object) -> TypeError:
    kind = type(found)
    return TypeError(
        f"{kind.__module__}.{kind.__qualname__} is no connection of psycopg 3, asyncpg, SQLAlchemy or Django"
        " (an engine or a pool is none either: take a connection from it)"
    )


def not_in_transaction(how: str) -> NotInTransaction:
    return NotInTransaction(f"the connection has no transaction open, so this would be committed on its own: {how}")


def in_transaction() -> InTransaction:
    return InTransaction("the connection has a transaction open: commit it first, since this commits one of its own")


class _Psycopg:
    def __init__(self, connection: Any) -> None:
        psycopg = sys.modules["psycopg"]
        self._psycopg, self._connection = psycopg, connection
        self.asynchronous = isinstance(connection, psycopg.AsyncConnection)
        if not self.asynchronous and not isinstance(connection, psycopg.Connection):
            raise not_a_connection(connection)

    def execute(self, statement: str, parameters: Sequence[str | None]) -> Any:
        # Without autocommit psycopg begins by itself. In a pipeline the status is ACTIVE, which says nothing.
        if self._connection.autocommit and self._status not in ("INTRANS", "INERROR"):
            raise not_in_transaction("use `with connection.transaction()`")
        # Cursors of our own: the connection's may take other placeholders, or give rows that are no tuples.
        if self.asynchronous:
            return self._execute(statement, parameters)
        cursor = self._psycopg.RawCursor(self._connection, row_factory=self._psycopg.rows.tuple_row)
        with cursor:
            return cursor.execute(statement, parameters).fetchall()

    async def _execute(self, statement: str, parameters: Sequence[str | None]) -> Any:
        cursor = self._psycopg.AsyncRawCursor(self._connection, row_factory=self._psycopg.rows.tuple_row)
        async with cursor:
            await cursor.execute(statement, parameters)
            return await cursor.fetchall()

    def transaction(self) -> Any:
        if self._status != "IDLE":
            raise in_transaction()
        return self._connection.transaction()

    @property
    def _status(self) -> str:
        name: str = self._connection.info.transaction_status.name
        return name


class _Asyncpg:
    asynchronous = True

    def __init__(self, connection: Any) -> None:
        # A Pool has no such method, a connection taken from it does.
        if not hasattr(connection, "is_in_transaction"):
            raise not_a_connection(connection)
        self._connection = connection

    def execute(self, statement: str, parameters: Sequence[str | None]) -> Any:
        if not self._connection.is_in_transaction():
            raise not_in_transaction("use `async with connection.transaction()`")
        return self._connection.fetch(statement, *parameters)

    def transaction(self) -> Any:
        if self._connection.is_in_transaction():
            raise in_transaction()
        return self._connection.transaction()


class _SQLAlchemy:
    def __init__(self, connection: Any) -> None:
        orm, extension = sys.modules.get("sqlalchemy.orm"), sys.modules.get("sqlalchemy.ext.asyncio")
        if isinstance(connection, _classes(orm, "scoped_session") + _classes(extension, "async_scoped_session")):
            connection = connection()
        self._connection = connection
        self._sessions = _classes(orm, "Session")
        self.asynchronous = isinstance(connection, _classes(extension, "AsyncConnection", "AsyncSession"))
        known = self._sessions + _classes(sys.modules["sqlalchemy"], "Connection")
        if not self.asynchronous and not isinstance(connection, known):
            raise not_a_connection(connection)

    def execute(self, statement: str, parameters: Sequence[str | None]) -> Any:
        if self.asynchronous:
            return self._connection.run_sync(self._execute, statement, parameters)
        return self._execute(self._connection, statement, parameters)

    def _execute(self, connection: Any, statement: str, parameters: Sequence[str | None]) -> Any:
        if isinstance(connection, self._sessions):
            if not connection.in_transaction() and not connection.autobegin:
                raise not_in_transaction("call `session.begin()`")
            connection = connection.connection()
        # The driver's own word: SQLAlchemy's isolation level can come from the engine, the connection or a URL.
        if connection.connection.dbapi_connection.autocommit:
            raise not_in_transaction("its isolation level is AUTOCOMMIT")
        text = sys.modules["sqlalchemy"].text(_PARAMETER.sub(r":p\1", statement))
        named = {f"p{place}": value for place, value in enumerate(parameters, 1)}
        return connection.execute(text, named).all()

    def transaction(self) -> Any:
        if self._connection.in_transaction():
            raise in_transaction()
        return self._connection.begin()


class _Django:
    asynchronous = False

    def __init__(self, connection: Any) -> None:
        # Not only by class: `django.db.connection` stands for the connection of the current thread.
        if not hasattr(connection, "in_atomic_block"):
            raise not_a_connection(connection)
        self._connection = connection

    def execute(self, statement: str, parameters: Sequence[str | None]) -> Any:
        if self._connection.get_autocommit() and not self._connection.in_atomic_block:
            raise not_in_transaction("use `with transaction.atomic()`")
        with self._connection.cursor() as cursor:
            cursor.execute(_PARAMETER.sub("%s", statement), parameters)
            return cursor.fetchall()

    def transaction(self) -> Any:
        if self._connection.in_atomic_block or not self._connection.get_autocommit():
            raise in_transaction()
        return sys.modules["django.db.transaction"].atomic(using=self._connection.alias)


def _classes(module: ModuleType | None, *names: str) -> tuple[Any, ...]:
    """Of a module that may not be imported: then nothing can be an instance of them."""
    return () if module is None else tuple(getattr(module, name) for name in names)
