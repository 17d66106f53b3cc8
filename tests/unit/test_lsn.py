import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_outbox.lsn import format_lsn, parse_lsn

positions = st.integers(0, 2**64 - 1)


@given(positions)
def test_a_position_survives_being_written_and_read(position: int) -> None:
    assert parse_lsn(format_lsn(position)) == position
    assert parse_lsn(format_lsn(position).lower()) == position


@pytest.mark.parametrize(
    ("position", "text"),
    [
        (0, "0/0"),
        (0xA0, "0/A0"),
        (0x1_0000_00A0, "1/A0"),
        (0x16_B374_D848, "16/B374D848"),
        (2**64 - 1, "FFFFFFFF/FFFFFFFF"),
    ],
)
def test_a_position_is_written_as_pg_lsn_prints_it(position: int, text: str) -> None:
    assert format_lsn(position) == text
    assert parse_lsn(text) == position


def test_leading_zeros_are_read() -> None:
    assert parse_lsn("00000001/000000a0") == 0x1_0000_00A0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "1",
        "1/",
        "/1",
        "1/2/3",
        "g/0",
        "0/x",
        "-1/0",
        "+1/0",
        "0x1/0",
        " 1/0",
        "1/ 0",
        "1_0/0",
        "123456789/0",
        "0/123456789",
        "\u0661/\u0662",  # Arabic digits
    ],
)
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="not a WAL position"):
        parse_lsn(text)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert 0 <= parse_lsn(text) < 2**64
