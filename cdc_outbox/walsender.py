"""The messages of the streaming replication protocol that travel inside CopyData: bytes to values and back. PURE.

https://www.postgresql.org/docs/current/protocol-replication.html
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass

from cdc_outbox.errors import ProtocolError

XLOG_DATA = ord("w")
KEEPALIVE = ord("k")
XLOG_DATA_HEADER_BYTES = 25
"""Where the plugin's own bytes begin in an XLogData message: tag, wal_start, wal_end, clock."""

POSTGRES_EPOCH_SECONDS = 946_684_800
"""2000-01-01 UTC, from which Postgres counts microseconds."""

_KEEPALIVE = struct.Struct(">cqqB")
_STATUS_UPDATE = struct.Struct(">cqqqqB")


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Primary keepalive: the end of WAL the server has sent, and whether it wants a reply at once."""

    wal_end: int
    reply_requested: bool


def decode_keepalive(message: bytes) -> Keepalive:
    """Raises ProtocolError unless `message` is exactly one primary keepalive."""
    if len(message) != _KEEPALIVE.size or message[0] != KEEPALIVE:
        raise ProtocolError(f"not a keepalive: {len(message)} bytes")
    _, wal_end, _, reply_requested = _KEEPALIVE.unpack(message)
    if reply_requested > 1:
        raise ProtocolError(f"keepalive with reply flag {reply_requested}")
    return Keepalive(wal_end, reply_requested == 1)


def encode_status_update(
    written: int, flushed: int, *, reply_requested: bool = False, now: float | None = None
) -> bytes:
    """Standby status update. `flushed` is the promise: the server may forget all WAL below it."""
    clock = int(((time.time() if now is None else now) - POSTGRES_EPOCH_SECONDS) * 1_000_000)
    return _STATUS_UPDATE.pack(b"r", written, flushed, flushed, clock, reply_requested)
