"""What a walsender with pgoutput would send: values to bytes, the other direction of `walsender` and `pgoutput`."""

import struct
from collections.abc import Sequence

RELATION_HEAD = struct.Struct(">cI")
TEXT_OID = 25


def begin(final_lsn: int, xid: int) -> bytes:
    return _xlog_data(struct.pack(">cqqI", b"B", final_lsn, 0, xid % (1 << 32)))


def commit(commit_lsn: int, end_lsn: int) -> bytes:
    return _xlog_data(struct.pack(">cBqqq", b"C", 0, commit_lsn, end_lsn, 0))


def relation(oid: int, namespace: str, name: str, columns: Sequence[str]) -> bytes:
    body = RELATION_HEAD.pack(b"R", oid) + _string(namespace) + _string(name) + b"d" + struct.pack(">H", len(columns))
    return _xlog_data(body + b"".join(b"\0" + _string(column) + struct.pack(">II", TEXT_OID, 0) for column in columns))


def insert(oid: int, values: Sequence[bytes]) -> bytes:
    body = struct.pack(">cIcH", b"I", oid, b"N", len(values))
    return _xlog_data(body + b"".join(b"t" + struct.pack(">I", len(value)) + value for value in values))


def keepalive(wal_end: int, reply_requested: bool) -> bytes:
    return struct.pack(">cqqB", b"k", wal_end, 0, reply_requested)


def _xlog_data(body: bytes) -> bytes:
    return struct.pack(">cqqq", b"w", 0, 0, 0) + body


def _string(text: str) -> bytes:
    return text.encode() + b"\0"
