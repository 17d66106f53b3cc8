"""The replication connection: the only user of COPY BOTH.

psycopg's own copy helpers do not do COPY BOTH; its libpq layer (`psycopg.pq`) does. Simple protocol only, as a
walsender demands. No method blocks except `Replication.start`, for one round trip, and `finish`.
"""

from __future__ import annotations

import time

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc_outbox.errors import ConnectionLost, GapError, OutboxError, Stopped
from cdc_outbox.objects import WAY_BACK
from cdc_outbox.query import ANSWER_SECONDS, TLS_READS, connection_lost, is_dry, open_connection, result_error
from cdc_outbox.statements import identifier
from cdc_outbox.wakeup import READ, WRITE, Wakeup
from cdc_outbox.walsender import encode_status_update

GAPS = (b"42704", b"55000", b"58P01")
"""undefined_object, object_not_in_prerequisite_state, undefined_file: of any other statement they say another thing."""
REFUSED_HINT = (
    "plain connections work, so look at the role's attribute REPLICATION, at max_wal_senders, and that no pooler stands"
    " between"
)
"""Libpq does not hand over the SQLSTATE of a refused connection; a plain one had been made just before."""


class Replication:
    """`START_REPLICATION` and its two-way stream."""

    def __init__(self, conninfo: str, wakeup: Wakeup) -> None:
        """Raises ConnectionLost, Stopped."""
        self._wakeup = wakeup
        # The stream's text must be UTF-8 and bytea hexadecimal, whatever the database or the role is set to.
        own_options = conninfo_to_dict(conninfo).get("options") or ""
        own = {"replication": "database", "client_encoding": "UTF8"}
        own["options"] = f"{own_options} -c bytea_output=hex".strip()
        try:
            self._pgconn = open_connection(make_conninfo(conninfo, **own), wakeup)
        except ConnectionLost as error:
            raise ConnectionLost(f"replication: {error}", REFUSED_HINT) from None
        self._tls = bool(self._pgconn.ssl_in_use)
        self._dry_reads = TLS_READS if self._tls else 1
        self._unflushed = False

    def start(self, slot: str, publication: str) -> None:
        """Begin to stream from the slot's own confirmed position. Raises what the SQLSTATE says (SlotInUse, …)."""
        # Not `literal`: the walsender's own scanner knows no E'…' and takes a backslash as it is.
        names = "'" + identifier(publication).replace("'", "''") + "'"
        self._pgconn.send_query(
            f"START_REPLICATION SLOT {identifier(slot)} LOGICAL 0/0"
            f" (proto_version '1', publication_names {names})".encode()
        )
        deadline = time.monotonic() + ANSWER_SECONDS
        while self._pgconn.is_busy():
            if self._wakeup.stop_requested:
                raise Stopped("stopped while starting replication")
            self._wait_until(deadline, "START_REPLICATION")
            self._consume()
        result = self._pgconn.get_result()
        if result is None or result.status != pq.ExecStatus.COPY_BOTH:
            while self._pgconn.get_result() is not None:
                pass  # ready for the next attempt on this connection
            raise self._error(result, "starting replication")

    def receive(self) -> bytes | None:
        """The next CopyData message, or None when none is here yet. Raises ConnectionLost and the like."""
        dry = 0
        while True:
            try:
                length, view = self._pgconn.get_copy_data(1)
            except psycopg.Error as error:
                raise connection_lost("replication", self._pgconn, error) from None
            if length > 0:
                return bytes(view)  # produce() refuses a memoryview: copied once, here
            if length < 0:
                raise self._error(self._pgconn.get_result(), "replication ended")
            if dry == self._dry_reads:
                return None
            dry += not self._tls or is_dry(self._pgconn)
            self._consume()

    def send_status(self, written: int, flushed: int, *, reply_requested: bool = False) -> None:
        """Queue a status update; `flush` is retried by `interest` and the next call if the socket is full."""
        try:
            self._pgconn.put_copy_data(encode_status_update(written, flushed, reply_requested=reply_requested))
        except psycopg.Error as error:
            raise connection_lost("replication", self._pgconn, error) from None
        self.flush()

    def flush(self) -> None:
        try:
            self._unflushed = self._pgconn.flush() == 1
        except psycopg.Error as error:
            raise connection_lost("replication", self._pgconn, error) from None

    def interest(self, *, reading: bool = True) -> list[tuple[int, int]]:
        """What to wait for on this connection."""
        # While a flush is unfinished libpq must read too, or both sides wait for each other.
        mask = (READ if reading or self._unflushed else 0) | (WRITE if self._unflushed else 0)
        return [(self._pgconn.socket, mask)] if mask else []

    def finish(self, deadline: float) -> None:
        """CopyDone, then read to the end so that the last status update has been taken. Never raises."""
        try:
            self._pgconn.put_copy_end()
            while self._pgconn.flush() == 1 and time.monotonic() < deadline:
                self._wait_until(deadline, "CopyDone")
            while time.monotonic() < deadline:
                length, _ = self._pgconn.get_copy_data(1)
                if length < 0:
                    break
                if length == 0:
                    self._wait_until(deadline, "the end of the stream")
                    self._consume()
        except (OutboxError, psycopg.Error):
            pass  # whatever was not taken is sent again: at least once
        finally:
            self.close()

    def close(self) -> None:
        self._pgconn.finish()

    def _error(self, result: pq.abc.PGresult | None, doing: str) -> OutboxError:
        if result is None or self._pgconn.status == pq.ConnStatus.BAD:
            return connection_lost(doing, self._pgconn)
        # As of the WAL position that is being decoded there was no such publication (PostgreSQL 15 to 17), or the slot
        # was lost, or WAL that it needs is gone.
        if result.error_field(pq.DiagnosticField.SQLSTATE) in GAPS:
            return GapError(str(result_error(result, doing)), WAY_BACK)
        if result.status == pq.ExecStatus.FATAL_ERROR:
            return result_error(result, doing)
        return ConnectionLost(f"{doing}: the server ended the stream")

    def _consume(self) -> None:
        try:
            self._pgconn.consume_input()
        except psycopg.Error as error:
            raise connection_lost("replication", self._pgconn, error) from None

    def _wait_until(self, deadline: float, what: str) -> None:
        if time.monotonic() >= deadline:
            raise ConnectionLost(f"no answer from Postgres to {what}")
        self._wakeup.wait(self.interest(), deadline - time.monotonic())
