"""A plain SQL connection that never blocks the relay's loop: one question at a time, answered when it is answered."""

from __future__ import annotations

import contextlib
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc_outbox.conninfo import CONNECT_SECONDS
from cdc_outbox.errors import (
    ConnectionLost,
    OutboxError,
    Stopped,
    from_sqlstate,
    one_line,
)
from cdc_outbox.wakeup import READ, WRITE, Wakeup

Row = tuple[str | None, ...]
ANSWER_SECONDS = 30.0
"""A question this old means a dead or half-open connection."""
LONG_SECONDS = 24 * 3600.0
"""For a question about millions of rows: it takes as long as it takes."""
TLS_READS = 4
"""Decrypted bytes can wait inside TLS where poll(2) does not see them. Once the socket is dry this many more reads
empty it: a TLS record holds 16 kB, and libpq reads at least 8 kB a call."""


def connection_lost(doing: str, pgconn: pq.abc.PGconn | None, error: object = None) -> ConnectionLost:
    said = pgconn.get_error_message() if pgconn is not None else ""
    return ConnectionLost(f"{doing}: {one_line(said or str(error or 'connection closed'))}")


def open_connection(conninfo: str, wakeup: Wakeup) -> pq.abc.PGconn:
    """Connect without blocking signals. Raises ConnectionLost (libpq's own line: host and user, never a password)
    or Stopped."""
    failure = ConnectionLost("connecting to Postgres: no host given")
    for attempt in _one_host_each(conninfo):
        try:
            return _open_connection(attempt, wakeup)
        except ConnectionLost as error:
            failure = error
    raise failure


def _one_host_each(conninfo: str) -> Iterator[str]:
    """libpq's asynchronous connect gives each of several hosts no limit of its own: try them one by one."""
    given = conninfo_to_dict(conninfo)
    lists = {name: str(given[name]).split(",") for name in ("host", "hostaddr", "port") if given.get(name)}
    for index in range(max(map(len, lists.values()), default=1)):
        one = {
            name: values[index] if len(values) > 1 else values[0]
            for name, values in lists.items()
            if len(values) == 1 or index < len(values)
        }
        yield make_conninfo(**{**given, **one})  # type: ignore[arg-type]  # psycopg's own dict


def _open_connection(conninfo: str, wakeup: Wakeup) -> pq.abc.PGconn:
    pgconn = pq.PGconn.connect_start(conninfo.encode())
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        if pgconn.status == pq.ConnStatus.BAD:
            error = connection_lost("connecting to Postgres", pgconn)
            pgconn.finish()
            raise error
        match pgconn.connect_poll():
            case pq.PollingStatus.OK:
                break
            case pq.PollingStatus.READING:
                mask = READ
            case pq.PollingStatus.WRITING:
                mask = WRITE
            case _:
                continue  # the status is BAD now
        if wakeup.stop_requested:
            pgconn.finish()
            raise Stopped("stopped while connecting")
        if time.monotonic() >= deadline:
            pgconn.finish()
            raise ConnectionLost(f"connecting to Postgres: no answer within {CONNECT_SECONDS:.0f} s")
        wakeup.wait([(pgconn.socket, mask)], deadline - time.monotonic())
    pgconn.nonblocking = 1
    return pgconn


def take_input(pgconn: pq.abc.PGconn) -> None:
    """Everything that is here, up to the end of what is being read; never blocks. Raises psycopg.Error.

    See TLS_READS; without it the rest of a long answer waited for the next word of a server that has none.
    """
    pgconn.consume_input()
    if pgconn.ssl_in_use:
        dry = 0
        while dry < TLS_READS and pgconn.is_busy():
            dry += is_dry(pgconn)
            pgconn.consume_input()


def is_dry(pgconn: pq.abc.PGconn) -> bool:
    """Nothing more is in the socket."""
    poller = select.poll()
    poller.register(pgconn.socket, select.POLLIN)
    return not poller.poll(0)


def server_is_starting(conninfo: str) -> bool:
    """The server is there and refuses for now (starting up, shutting down): worth waiting for."""
    return pq.PGconn.ping(conninfo.encode()) == pq.Ping.REJECT


def result_error(result: pq.abc.PGresult, doing: str) -> OutboxError:
    """The error of ours for a failed result."""
    sqlstate = result.error_field(pq.DiagnosticField.SQLSTATE)
    message = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"no message"
    hint = result.error_field(pq.DiagnosticField.MESSAGE_HINT) or b""
    return from_sqlstate(
        sqlstate.decode() if sqlstate else None,
        message.decode(errors="replace"),
        doing,
        hint.decode(errors="replace"),
    )


@dataclass(frozen=True, slots=True)
class _Question:
    query: bytes
    parameters: tuple[bytes | None, ...]
    doing: str
    answered: Callable[[list[Row]], None]
    seconds: float


class Queries:
    """Questions go out in order; `service` calls each one's `answered` with its rows (text, or None for NULL).

    `notified` is called with the payload of each NOTIFY on a channel that was LISTENed to.
    """

    def __init__(self, conninfo: str, wakeup: Wakeup, notified: Callable[[str], None] | None = None) -> None:
        self._pgconn = open_connection(make_conninfo(conninfo, client_encoding="UTF8"), wakeup)
        self._wakeup = wakeup
        self._notified = notified
        self._waiting: deque[_Question] = deque()
        self._asked: _Question | None = None
        self._deadline = 0.0
        self._unflushed = False

    @property
    def idle(self) -> bool:
        return self._asked is None

    @property
    def deadline(self) -> float:
        """When `service` will give up on the question that is being asked (monotonic)."""
        return self._deadline if self._asked is not None else float("inf")

    @property
    def backend_pid(self) -> int:
        """What the other side calls its process; a pooler makes it up."""
        return self._pgconn.backend_pid

    def ask(
        self,
        query: str,
        parameters: Sequence[object],
        answered: Callable[[list[Row]], None],
        doing: str,
        seconds: float = ANSWER_SECONDS,
    ) -> None:
        """Send `query` when its turn comes. Parameters are `$1`, `$2`, …"""
        values = tuple(None if value is None else str(value).encode() for value in parameters)
        self._waiting.append(_Question(query.encode(), values, doing, answered, seconds))
        self._send_next()

    def call(
        self,
        query: str,
        parameters: Sequence[object] = (),
        *,
        doing: str,
        seconds: float = ANSWER_SECONDS,
    ) -> list[Row]:
        """Ask and wait for the answer, as at a start. Raises Stopped, ConnectionLost and what the SQLSTATE says."""
        answers: list[list[Row]] = []
        self.ask(query, parameters, answers.append, doing, seconds)
        self.wait_until(lambda: bool(answers) and self.idle, doing)
        return answers[0]

    def wait_until(self, answered: Callable[[], bool], doing: str) -> None:
        """Raises Stopped, and as `service` does."""
        while not answered():
            if self._wakeup.stop_requested:
                raise Stopped(f"stopped while {doing}")
            self.wait()

    def cancel(self) -> None:
        """Ask the server to give up what it is doing for us. Never raises."""
        with contextlib.suppress(psycopg.Error):  # the connection is closed next, which ends it too
            self._pgconn.get_cancel().cancel()

    def wait(self, seconds: float = ANSWER_SECONDS) -> None:
        """Wait for something to arrive, and take it. Raises as `service` does."""
        self._wakeup.wait(self.interest(), min(seconds, ANSWER_SECONDS))
        self.service()

    def service(self) -> None:
        """Take what has arrived. Never blocks. Raises ConnectionLost and what the SQLSTATE says."""
        try:
            if self._unflushed:
                self._unflushed = self._pgconn.flush() == 1
            take_input(self._pgconn)
        except psycopg.Error as error:
            raise connection_lost(self._doing(), self._pgconn, error) from None
        while (notice := self._pgconn.notifies()) is not None:
            if self._notified is not None:
                self._notified(notice.extra.decode(errors="replace"))
        while self._asked is not None and not self._pgconn.is_busy():
            self._take_result(self._asked)
        if self._asked is not None and time.monotonic() > self._deadline:
            raise ConnectionLost(f"{self._doing()}: no answer within {self._asked.seconds:.0f} s")

    def interest(self) -> list[tuple[int, int]]:
        return [(self._pgconn.socket, READ | (WRITE if self._unflushed else 0))]

    def close(self) -> None:
        self._pgconn.finish()

    def _doing(self) -> str:
        return self._asked.doing if self._asked is not None else "SQL connection"

    def _send_next(self) -> None:
        if self._asked is None and self._waiting:
            self._asked = self._waiting.popleft()
            self._deadline = time.monotonic() + self._asked.seconds
            try:
                self._pgconn.send_query_params(self._asked.query, self._asked.parameters)
                self._unflushed = self._pgconn.flush() == 1
            except psycopg.Error as error:
                raise connection_lost(self._asked.doing, self._pgconn, error) from None

    def _take_result(self, question: _Question) -> None:
        result = self._pgconn.get_result()
        if result is None:
            # libpq says "no more results" after each answer: only now may the next question go out.
            self._asked = None
            self._send_next()
        elif result.status == pq.ExecStatus.TUPLES_OK or result.status == pq.ExecStatus.COMMAND_OK:
            question.answered(_rows(result))
        elif self._pgconn.status == pq.ConnStatus.BAD:
            raise connection_lost(question.doing, self._pgconn)
        else:
            while self._pgconn.get_result() is not None:
                pass  # ready for the next question, for those who go on
            self._asked = None
            raise result_error(result, question.doing)


def _rows(result: pq.abc.PGresult) -> list[Row]:
    def text(row: int, column: int) -> str | None:
        value = result.get_value(row, column)
        return None if value is None else value.decode()

    return [tuple(text(row, column) for column in range(result.nfields)) for row in range(result.ntuples)]
