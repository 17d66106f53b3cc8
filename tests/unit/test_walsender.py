import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_outbox.errors import ProtocolError
from cdc_outbox.walsender import POSTGRES_EPOCH_SECONDS, Keepalive, decode_keepalive, encode_status_update

positions = st.integers(0, 2**63 - 1)


def keepalive(wal_end: int, reply: int) -> bytes:
    return b"k" + struct.pack(">qqB", wal_end, 0, reply)


@given(positions, st.booleans())
def test_a_keepalive_tells_the_end_of_wal_and_whether_a_reply_is_wanted(wal_end: int, reply: bool) -> None:
    assert decode_keepalive(keepalive(wal_end, reply)) == Keepalive(wal_end, reply)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"k",
        b"z" + bytes(17),
        b"w" + bytes(17),
        keepalive(1, 2),
        keepalive(1, 255),
        keepalive(1, 0) + b"\0",
        keepalive(1, 0)[:-1],
    ],
)
def test_anything_but_exactly_one_keepalive_is_a_protocol_error(message: bytes) -> None:
    with pytest.raises(ProtocolError, match="keepalive"):
        decode_keepalive(message)


@given(positions, positions, st.booleans())
def test_a_status_update_carries_written_flushed_applied_clock_and_flag(
    written: int, flushed: int, reply: bool
) -> None:
    message = encode_status_update(written, flushed, reply_requested=reply, now=POSTGRES_EPOCH_SECONDS + 1.5)
    assert struct.unpack(">cqqqqB", message) == (b"r", written, flushed, flushed, 1_500_000, reply)


def test_a_status_update_is_stamped_with_the_present_unless_told() -> None:
    (clock,) = struct.unpack_from(">q", encode_status_update(1, 1), 25)
    year_2025, year_2100 = 1_735_689_600, 4_102_444_800
    assert year_2025 < POSTGRES_EPOCH_SECONDS + clock / 1e6 < year_2100
