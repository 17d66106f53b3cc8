"""A connection of each client library, driven the same way: what it is, a transaction of its own kind, its end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import asyncpg
import django
import psycopg
import sqlalchemy
import sqlalchemy.ext.asyncio
import sqlalchemy.orm
from django.conf import settings
from django.db import connections, transaction

from tests.fix_postgres import Database


class Client:
    """`connection` is what a test hands over; `transaction()` is the library's own, entered and left."""

    connection: Any

    def __init__(self, database: Database, autocommit: bool) -> None:
        self.address = {"host": str(database.server.directory), "port": database.server.port}
        self.dbname = database.name
        self._runner: asyncio.Runner | None = None
        self.open(autocommit)

    def open(self, autocommit: bool) -> None:
        raise NotImplementedError

    def block(self) -> Any:
        return self.connection.transaction()

    def shut(self) -> Any:
        return self.connection.close()

    @property
    def url(self) -> str:
        return f"postgres@/{self.dbname}?host={self.address['host']}&port={self.address['port']}"

    def wait(self, result: Any) -> Any:
        """The result, awaited if it must be."""
        if not isinstance(result, Awaitable):
            return result
        if self._runner is None:
            self._runner = asyncio.Runner()

        async def awaited() -> Any:
            return await result

        return self._runner.run(awaited())

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits, or rolls back when an exception comes out of it."""
        block = self.block()
        asynchronous = hasattr(block, "__aenter__") and not hasattr(block, "__enter__")
        enter, leave = ("__aenter__", "__aexit__") if asynchronous else ("__enter__", "__exit__")
        self.wait(getattr(block, enter)())
        try:
            yield
        except BaseException:
            self.wait(getattr(block, leave)(*sys.exc_info()))
            raise
        self.wait(getattr(block, leave)(None, None, None))

    def close(self) -> None:
        self.wait(self.shut())
        if self._runner is not None:
            self._runner.close()


class Psycopg(Client):
    def open(self, autocommit: bool) -> None:
        params: dict[str, Any] = {**self.address, "user": "postgres", "dbname": self.dbname}
        self.connection = psycopg.connect(**params, autocommit=autocommit)


class PsycopgAsync(Client):
    def open(self, autocommit: bool) -> None:
        params: dict[str, Any] = {**self.address, "user": "postgres", "dbname": self.dbname}
        self.connection = self.wait(psycopg.AsyncConnection.connect(**params, autocommit=autocommit))


class Asyncpg(Client):
    """Has nothing but autocommit outside a transaction."""

    def open(self, autocommit: bool) -> None:
        self.connection = self.wait(asyncpg.connect(**self.address, user="postgres", database=self.dbname))


class AsyncpgPool(Client):
    """A connection that a pool lends."""

    def open(self, autocommit: bool) -> None:
        async def lend() -> Any:
            self.pool = await asyncpg.create_pool(**self.address, user="postgres", database=self.dbname, min_size=1)
            return await self.pool.acquire()

        self.connection = self.wait(lend())

    def shut(self) -> Any:
        async def give_back() -> None:
            await self.pool.release(self.connection)
            await self.pool.close()

        return give_back()


def isolation(autocommit: bool) -> dict[str, Any]:
    return {"isolation_level": "AUTOCOMMIT"} if autocommit else {}


class SQLAlchemyConnection(Client):
    def open(self, autocommit: bool) -> None:
        self.engine = sqlalchemy.create_engine(f"postgresql+psycopg://{self.url}", **isolation(autocommit))
        self.connection = self.opened()

    def opened(self) -> Any:
        return self.engine.connect()

    def block(self) -> Any:
        return self.connection.begin()

    def shut(self) -> None:
        self.connection.close()
        self.engine.dispose()


class SQLAlchemySession(SQLAlchemyConnection):
    def opened(self) -> Any:
        return sqlalchemy.orm.Session(self.engine)


class SQLAlchemyScopedSession(SQLAlchemyConnection):
    def opened(self) -> Any:
        return sqlalchemy.orm.scoped_session(sqlalchemy.orm.sessionmaker(self.engine))


class SQLAlchemyAsyncConnection(Client):
    driver = "asyncpg"

    def open(self, autocommit: bool) -> None:
        url = f"postgresql+{self.driver}://{self.url}"
        self.engine = sqlalchemy.ext.asyncio.create_async_engine(url, **isolation(autocommit))
        self.connection = self.wait(self.opened())

    async def opened(self) -> Any:
        return await self.engine.connect()

    def block(self) -> Any:
        return self.connection.begin()

    def shut(self) -> Any:
        async def close() -> None:
            await self.connection.close()
            await self.engine.dispose()

        return close()


class SQLAlchemyAsyncSession(SQLAlchemyAsyncConnection):
    driver = "psycopg"

    async def opened(self) -> Any:
        return sqlalchemy.ext.asyncio.AsyncSession(self.engine)


class SQLAlchemyAsyncScopedSession(SQLAlchemyAsyncConnection):
    async def opened(self) -> Any:
        maker = sqlalchemy.ext.asyncio.async_sessionmaker(self.engine)
        return sqlalchemy.ext.asyncio.async_scoped_session(maker, scopefunc=lambda: 1)


class Django(Client):
    """Has nothing but autocommit outside `atomic`."""

    def open(self, autocommit: bool) -> None:
        set_up_django()
        databases = cast(dict[str, Any], connections.databases)
        where = {"HOST": self.address["host"], "PORT": self.address["port"], "NAME": self.dbname}
        databases[self.dbname] = {**databases["default"], **where}
        self.connection = connections[self.dbname]

    def block(self) -> Any:
        return transaction.atomic(using=self.dbname)

    def shut(self) -> None:
        self.connection.close()
        del connections[self.dbname], connections.databases[self.dbname]


def set_up_django() -> None:
    """Once a process; each test adds a database of its own."""
    if not settings.configured:
        default = {"ENGINE": "django.db.backends.postgresql", "USER": "postgres", "NAME": "none"}
        settings.configure(DATABASES={"default": default}, INSTALLED_APPS=["cdc_outbox.contrib.django"], USE_TZ=True)
        django.setup()


KINDS: dict[str, type[Client]] = {
    "psycopg": Psycopg,
    "psycopg async": PsycopgAsync,
    "asyncpg": Asyncpg,
    "asyncpg pool": AsyncpgPool,
    "SQLAlchemy": SQLAlchemyConnection,
    "SQLAlchemy session": SQLAlchemySession,
    "SQLAlchemy scoped": SQLAlchemyScopedSession,
    "SQLAlchemy async": SQLAlchemyAsyncConnection,
    "SQLAlchemy async session": SQLAlchemyAsyncSession,
    "SQLAlchemy async scoped": SQLAlchemyAsyncScopedSession,
    "Django": Django,
}
