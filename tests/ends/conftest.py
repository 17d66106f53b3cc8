"""The tables of both ends, and a client of each library that an application or a worker may bring."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from cdc_outbox.embedded import PostgresServer
from cdc_outbox.objects import Objects
from cdc_outbox.statements import statements
from tests.ends.clients import KINDS, Client
from tests.fix_postgres import Database

OpenClient = Callable[..., Client]

NAMES = {
    **Objects("public", "outbox", 0, "slot", "publication").names(),
    "inbox": "inbox",
    "inbox_done_at": "inbox_done_at",
}


class Shared(Database):
    """A database of all tests of this folder that change no table's shape: emptied, not made anew."""

    def disconnect(self) -> None:
        for connection in self._connections:
            connection.close()


def make_tables(database: Database) -> None:
    for file in ("tables.sql", "inbox.sql"):
        for statement in statements(file, NAMES):
            database.execute(statement)


@pytest.fixture(scope="session")
def shared_tables(postgres: PostgresServer) -> Iterator[str]:
    database = Database(postgres, f"test_{secrets.token_hex(4)}")
    database.create()
    try:
        make_tables(database)
        yield database.name
    finally:
        database.drop()


@pytest.fixture
def tables(postgres: PostgresServer, shared_tables: str) -> Iterator[Database]:
    """Outbox and inbox, empty, in a database of many tests."""
    database = Shared(postgres, shared_tables)
    database.execute("truncate outbox, inbox restart identity")
    try:
        yield database
    finally:
        database.disconnect()


@pytest.fixture
def own_tables(database: Database) -> Database:
    """The same in a database of the test's own, for what changes more than rows."""
    make_tables(database)
    return database


@pytest.fixture
def open_client() -> Iterator[OpenClient]:
    """`open_client(kind, database, autocommit=True)`; closed at the end of the test."""
    with ExitStack() as stack:

        def opened(kind: str, database: Database, *, autocommit: bool = False) -> Client:
            client = KINDS[kind](database, autocommit)
            stack.callback(client.close)
            return client

        yield opened
