"""The tables of both ends, and a client of each library that an application or a worker may bring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from cdc_outbox.statements import statements
from tests.ends.clients import KINDS, Client
from tests.fix_postgres import Database

OpenClient = Callable[..., Client]


@pytest.fixture
def tables(database: Database) -> Database:
    """A database with outbox and inbox in it, and no relay."""
    names = {"schema": "public", "outbox": "outbox", "checkpoint": "outbox_checkpoint"}
    names |= {"dead_letter": "outbox_dead_letter", "inbox": "inbox", "inbox_done_at": "inbox_done_at"}
    for file in ("tables.sql", "inbox.sql"):
        for statement in statements(file, names):
            database.execute(statement)
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
