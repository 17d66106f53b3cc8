"""The gate's one promise: True only for a transaction that had ended when the snapshot was taken."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_outbox.errors import ProtocolError
from cdc_outbox.visibility import VisibilityGate

EPOCH = 1 << 32


def gate(snapshot: str) -> VisibilityGate:
    made = VisibilityGate()
    made.learn(snapshot)
    return made


def test_nothing_is_visible_before_the_first_snapshot() -> None:
    assert not VisibilityGate().visible(3)


def test_what_is_below_xmin_is_visible_and_what_is_at_xmax_or_above_is_not() -> None:
    known = gate("100:200:150")
    assert [known.visible(xid) for xid in (3, 99)] == [True, True]
    assert [known.visible(xid) for xid in (200, 201, 2**31)] == [False, False, False]


def test_between_xmin_and_xmax_only_those_not_listed_as_running_are_visible() -> None:
    known = gate("100:105:100,103")
    assert [xid for xid in range(100, 105) if known.visible(xid)] == [101, 102, 104]


def test_an_empty_list_of_running_transactions_is_a_snapshot_too() -> None:
    known = gate("100:100:")
    assert known.visible(99)
    assert not known.visible(100)


def test_a_newer_snapshot_replaces_the_one_before_and_is_counted() -> None:
    known = gate("100:101:100")
    assert not known.visible(100)
    known.learn("101:101:")
    assert known.visible(100)
    assert known.snapshots == 2


def test_an_xid_from_before_the_wraparound_is_older_than_the_snapshot_after_it() -> None:
    known = gate(f"{EPOCH + 10}:{EPOCH + 20}:{EPOCH + 10}")
    assert known.visible(EPOCH - 1)
    assert known.visible(EPOCH - 100)
    assert known.visible(9)
    assert not known.visible(10)
    assert known.visible(11)
    assert not known.visible(20)


def test_an_xid_from_after_the_wraparound_is_newer_than_the_snapshot_before_it() -> None:
    known = gate(f"{EPOCH - 20}:{EPOCH - 10}:")
    assert known.visible(EPOCH - 11)
    assert not known.visible(EPOCH - 10)
    assert not known.visible(3)
    assert not known.visible(1000)


def test_a_transaction_running_across_the_wraparound_is_not_visible() -> None:
    known = gate(f"{EPOCH - 5}:{EPOCH + 5}:{EPOCH - 5},{EPOCH + 3}")
    assert not known.visible(EPOCH - 5)
    assert known.visible(EPOCH - 4)
    assert not known.visible(3)
    assert known.visible(4)


@given(
    st.integers(EPOCH // 2, 5 * EPOCH),
    st.integers(0, 50),
    st.sets(st.integers(0, 49), max_size=10),
    st.integers(-(2**31) + 1, 2**31 - 51),
)
def test_any_live_xid_is_judged_by_its_64_bits(xmin: int, width: int, running: set[int], distance: int) -> None:
    """`distance` from xmin: two live xids are never 2^31 apart."""
    xmax = xmin + width
    listed = {xmin + offset for offset in running if offset < width}
    known = gate(f"{xmin}:{xmax}:{','.join(map(str, sorted(listed)))}")
    full = xmax + distance
    expected = full < xmin or (full < xmax and full not in listed)
    assert known.visible(full % EPOCH) == expected


MALFORMED = [
    "",
    "1",
    "1:2",
    "1:2:3:4",
    "a:2:",
    "1:b:",
    "1:2:x",
    "1:2:1,",
    "1:2:,1",
    "5:4:",
    "0:0:",
    "-5:4:",
    "::",
    "1:2:1;2",
]


@pytest.mark.parametrize("snapshot", MALFORMED)
def test_a_malformed_snapshot_is_a_protocol_error_and_changes_nothing(snapshot: str) -> None:
    known = gate("100:105:103")
    with pytest.raises(ProtocolError, match="not a snapshot"):
        known.learn(snapshot)
    assert [xid for xid in range(99, 107) if known.visible(xid)] == [99, 100, 101, 102, 104]
    assert known.snapshots == 1


@given(st.text(alphabet="0123456789:,-x ", max_size=30))
def test_any_text_is_a_snapshot_or_a_protocol_error(text: str) -> None:
    with contextlib.suppress(ProtocolError):
        gate(text)
