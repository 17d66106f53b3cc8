"""PostgreSQL: one server for the session, one fresh database a test; private servers on request."""

import contextlib
import secrets
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import psycopg
import pytest
from psycopg import sql

from cdc_outbox.embedded import PostgresServer, postgres_bindir
from cdc_outbox.errors import PreconditionError
from tests.waiting import eventually


class StartPostgres(Protocol):
    def __call__(self, *, major: int | None = None, **settings: object) -> PostgresServer: ...


@dataclass(slots=True)
class Database:
    """An empty database of its own for one test. `connect()` is autocommit; the rig closes it."""

    server: PostgresServer
    name: str
    _connections: list[psycopg.Connection[Any]] = field(default_factory=list)

    @property
    def dsn(self) -> str:
        """Over TCP, as `postgres`, who is superuser."""
        return self.server.dsn(self.name)

    @property
    def socket_dsn(self) -> str:
        return self.server.socket_dsn(self.name)

    def connect(self, *, autocommit: bool = True, **params: Any) -> psycopg.Connection[Any]:
        conninfo = self.server.socket_dsn(self.name, **params)
        connection: psycopg.Connection[Any] = psycopg.connect(conninfo, autocommit=autocommit)
        self._connections.append(connection)
        return connection

    def execute(self, query: str, params: Mapping[str, object] | tuple[object, ...] = ()) -> None:
        """One statement on a connection of its own."""
        with psycopg.connect(self.socket_dsn, autocommit=True) as connection:
            connection.execute(query.encode(), params)

    def fetch(self, query: str, params: Mapping[str, object] | tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        """The rows of one query, on a connection of its own."""
        with psycopg.connect(self.socket_dsn, autocommit=True) as connection:
            return connection.execute(query.encode(), params).fetchall()

    def fetch_value(self, query: str, params: Mapping[str, object] | tuple[object, ...] = ()) -> Any:
        """The only column of the only row."""
        ((value,),) = self.fetch(query, params)
        return value

    def create(self) -> None:
        with self._maintenance() as connection:
            query = sql.SQL("create database {} template template0")
            connection.execute(query.format(sql.Identifier(self.name)))

    def drop(self) -> None:
        """Sessions first, then the slots they held, then the database; each within a deadline."""
        for connection in self._connections:
            connection.close()
        if not self.server.running:
            return
        name = sql.Identifier(self.name)
        with self._maintenance() as connection:
            exists = "select 1 from pg_database where datname = %s"
            if not connection.execute(exists, (self.name,)).fetchone():
                return
            self._roll_back_prepared()
            # A relay that still runs must not come back and take its slot again.
            connection.execute(sql.SQL("alter database {} allow_connections false").format(name))
            eventually(lambda: self._no_sessions(connection), 10, f"sessions on {self.name} ended")
            connection.execute(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = %s",
                (self.name,),
            )
            connection.execute(sql.SQL("drop database {}").format(name))

    def _roll_back_prepared(self) -> None:
        with self._maintenance(self.name) as connection:
            query = "select gid from pg_prepared_xacts where database = %s"
            for (gid,) in connection.execute(query, (self.name,)).fetchall():
                connection.execute(sql.SQL("rollback prepared {}").format(sql.Literal(gid)))

    def _no_sessions(self, connection: psycopg.Connection[Any]) -> bool:
        query = "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s"
        return not connection.execute(query, (self.name,)).fetchall()

    def _maintenance(self, dbname: str = "postgres") -> psycopg.Connection[Any]:
        options = "-c statement_timeout=15s -c synchronous_commit=local"
        conninfo = self.server.socket_dsn(dbname, options=options, connect_timeout=10)
        return psycopg.connect(conninfo, autocommit=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pg",
        type=int,
        default=18,
        choices=[15, 16, 17, 18],
        help="the PostgreSQL major to test against (default: 18)",
    )


def pytest_report_header(config: pytest.Config) -> str:
    try:
        args = [str(postgres_bindir(config.getoption("--pg")) / "postgres"), "--version"]
    except PreconditionError as error:
        return f"postgres: {error}; {error.hint}"
    version = subprocess.run(args, capture_output=True, text=True, check=True).stdout
    return f"postgres: {version.strip()}"


@pytest.fixture(scope="session")
def postgres_major(request: pytest.FixtureRequest) -> int:
    major: int = request.config.getoption("--pg")
    return major


def major_with_tls(preferred: int) -> int:
    """Some wheels were built without; skips where no other is there."""
    for major in (preferred, 17, 15):
        with contextlib.suppress(PreconditionError):
            if b"SSL_CTX_new" in (postgres_bindir(major) / "postgres").read_bytes():
                return major
    pytest.skip("no PostgreSQL with TLS on this machine")


@pytest.fixture(scope="session")
def postgres(postgres_major: int) -> Iterator[PostgresServer]:
    """The session's server. Shared: change no setting of it, stop nothing."""
    with PostgresServer(postgres_bindir(postgres_major)) as server:
        yield server.start()


@pytest.fixture
def new_database() -> Iterator[Callable[[PostgresServer], Database]]:
    """Makes a fresh database on any server, dropped at the end of the test."""
    with ExitStack() as stack:

        def new(server: PostgresServer) -> Database:
            database = Database(server, f"test_{secrets.token_hex(4)}")
            database.create()
            stack.callback(database.drop)
            return database

        yield new


@pytest.fixture
def database(postgres: PostgresServer, new_database: Callable[[PostgresServer], Database]) -> Database:
    """A fresh database on the session's server."""
    return new_database(postgres)


@pytest.fixture
def postgres_server(postgres_major: int) -> Iterator[StartPostgres]:
    """Starts a private server with settings of its own, to be restarted or killed by the test.

    `server = postgres_server(max_replication_slots=1)`; `new_database(server)` gives a database.
    """
    with ExitStack() as stack:

        def start(*, major: int | None = None, **settings: object) -> PostgresServer:
            bindir = postgres_bindir(major or postgres_major)
            server = stack.enter_context(PostgresServer(bindir, settings=settings))
            return server.start()

        yield start
