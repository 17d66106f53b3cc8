"""WAL positions (PostgreSQL's pg_lsn): 64-bit integers here, `X/Y` in hexadecimal where people read them."""

from __future__ import annotations

WAL_SEGMENT_BYTES = 16 * 1024 * 1024
"""initdb's default segment size; an idle relay holds back at most this much WAL."""


def format_lsn(position: int) -> str:
    """`format_lsn(0x1_0000_00A0) == "1/A0"`, as pg_lsn prints it."""
    return "%X/%X" % (position >> 32, position & 0xFFFFFFFF)  # noqa: UP031  # once a transaction, and twice as fast


def parse_lsn(text: str) -> int:
    """The inverse of `format_lsn`. Raises ValueError for anything that pg_lsn would not read."""
    high, slash, low = text.partition("/")
    if not slash or not (0 < len(high) <= 8 and 0 < len(low) <= 8):
        raise ValueError(f"not a WAL position: {text!r}")
    if not all(digit in "0123456789abcdefABCDEF" for digit in high + low):
        raise ValueError(f"not a WAL position: {text!r}")
    return int(high, 16) << 32 | int(low, 16)
