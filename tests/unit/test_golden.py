"""What PostgreSQL 15 to 18 really send, decoded whole, cut short, prolonged and damaged.

The bytes come from `tests/golden/capture.py`, whose script the expected values below follow.
"""

import contextlib
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc_outbox.errors import ProtocolError
from cdc_outbox.pgoutput import (
    Column,
    Relation,
    check_ignored,
    decode_begin,
    decode_commit,
    decode_insert,
    decode_relation,
    relation_oid,
)
from cdc_outbox.walsender import POSTGRES_EPOCH_SECONDS, Keepalive, decode_keepalive
from tests.golden.capture import MAJORS, label
from tests.unit.golden_stream import GOLDEN, START, Received, Sample, decode, samples, transactions

SAMPLES = samples()
BY_LABEL = {label(sample.message): sample for sample in SAMPLES}
MESSAGES = [message for streams in GOLDEN.values() for messages in streams.values() for message in messages]

every_major = pytest.mark.parametrize("major", MAJORS)

OUTBOX = ["id", "task", "args", "key", "headers"]
Brief = list[tuple[str | None, ...]]

# The rows of the outbox, one list a transaction: id, task, args, key, headers.
EXPECTED: list[Brief] = [
    [("1", "default", "{}", None, None)],
    [("1000", "explicit", '{"price": 1.10}', "k", '{"traceparent": "00-1"}')],
    [("2", "many", "1", "", None), ("3", "many", "2", None, None), ("4", "many", "3", "x", None)],
    [(str(4 + n), "copied", f'{{"row": {n}}}', None, None) for n in (1, 2, 3)],
    [("8", "größe", '{"n": 123456789012345678901234567890, "s": "é✓𝄞"}', "ключ", None)],
    [("9", "kept 1", "{}", None, None), ("11", "kept 2", "{}", None, None), ("12", "kept 3", "{}", None, None)],
    [("14", "before", "{}", None, None), ("15", "after", "{}", None, None)],
    [("16", "dropped", "{}", None, None)],
    [("19", "between", "{}", None, None)],
    [("17", "prepared", "{}", None, None)],
    [("20", "origin", "{}", None, None)],
    [("21", "last", "{}", None, None)],
]


def outbox_rows(received: list[Received]) -> list[Brief]:
    found = []
    for transaction in received:
        rows = [row for table, row in transaction.rows if table == "public.outbox"]
        if rows:
            found.append([tuple(row[name] for name in OUTBOX) for row in rows])
    return found


def rows_of(table: str, major: int) -> list[dict[str, str | None]]:
    received = transactions(GOLDEN[major]["workload"])
    return [row for transaction in received for name, row in transaction.rows if name == table]


def relations(major: int) -> list[Relation]:
    messages = GOLDEN[major]["workload"]
    return [decode_relation(message, START) for message in messages if label(message) == "Relation"]


@every_major
def test_each_committed_row_of_the_outbox_arrives_once_in_commit_order_and_no_other(major: int) -> None:
    assert outbox_rows(transactions(GOLDEN[major]["workload"])) == EXPECTED


@every_major
def test_every_commit_matches_its_begin_and_follows_the_one_before(major: int) -> None:
    received = transactions(GOLDEN[major]["workload"])
    assert len(received) > len(EXPECTED)
    commits = []
    for transaction in received:
        assert transaction.commit is not None
        assert transaction.commit.commit_lsn == transaction.begin.final_lsn
        assert transaction.commit.end_lsn > transaction.commit.commit_lsn
        commits.append(transaction.commit)
    assert all(before.end_lsn <= after.commit_lsn for before, after in pairwise(commits))


@every_major
def test_xids_are_distinct_small_numbers_and_commit_times_are_of_this_century(major: int) -> None:
    received = transactions(GOLDEN[major]["workload"])
    xids = [transaction.begin.xid for transaction in received]
    assert len(set(xids)) == len(xids)
    assert all(3 <= xid < 10_000 for xid in xids)
    year_2025, year_2100 = 1_735_689_600, 4_102_444_800
    # One transaction gives its commit time itself, as a replication origin may.
    times = [POSTGRES_EPOCH_SECONDS + transaction.begin.commit_time / 1e6 for transaction in received]
    assert times.count(1_704_067_200) == 1
    assert all(year_2025 < moment < year_2100 for moment in times if moment != 1_704_067_200)


@every_major
def test_an_explicit_timestamp_comes_as_postgres_prints_it(major: int) -> None:
    assert rows_of("public.outbox", major)[1]["created_at"] == "2024-02-29 12:00:00+00"


@every_major
def test_a_relation_names_its_columns_with_their_types(major: int) -> None:
    assert relations(major)[0] == Relation(
        oid=relations(major)[0].oid,
        namespace="public",
        name="outbox",
        columns=(
            Column("id", 20),
            Column("task", 25),
            Column("args", 3802),
            Column("key", 25),
            Column("headers", 3802),
            Column("created_at", 1184),
        ),
    )


@every_major
def test_a_new_relation_comes_after_each_change_of_the_tables_shape(major: int) -> None:
    shapes = [
        [column.name for column in relation.columns] for relation in relations(major) if relation.name == "outbox"
    ]
    assert shapes == [[*OUTBOX, "created_at"], [*OUTBOX, "created_at", "extra"], [*OUTBOX, "created_at"]]
    rows = {row["task"]: row for row in rows_of("public.outbox", major)}
    assert "extra" not in rows["before"]
    assert rows["after"]["extra"] == "7"
    assert "extra" not in rows["dropped"]


@every_major
def test_enum_domain_composite_and_array_columns_decode_as_text(major: int) -> None:
    assert rows_of("public.typed", major) == [{"id": "1", "m": "busy", "p": "7", "c": "(1,b)", "ms": "{calm,busy}"}]


@every_major
def test_quoted_and_unicode_names_decode(major: int) -> None:
    assert rows_of('Größe "q" ü.Job %s', major) == [{"Na me": "quoted", "ключ": "5"}]


@every_major
def test_rows_of_a_partitioned_table_come_under_its_roots_name(major: int) -> None:
    assert rows_of("public.parted", major) == [{"id": "1", "task": "low"}, {"id": "101", "task": "high"}]
    assert not rows_of("public.parted_low", major)


@every_major
def test_updates_deletes_truncates_types_and_origins_are_recognised_and_ignored(major: int) -> None:
    received = transactions(GOLDEN[major]["workload"])
    seen = [transaction.others for transaction in received if transaction.others]
    # plain: two updates, a delete; whole: the same with whole old rows; the outbox; types; toast; truncate; origin.
    assert seen == ["U", "U", "D", "U", "D", "UD", "YYYY", "U", "T", "O"]
    kinds = {(chr(m[START]), chr(m[START + 5])) for m in MESSAGES if m[START : START + 1] in (b"U", b"D")}
    assert kinds == {("U", "N"), ("U", "K"), ("U", "O"), ("D", "K"), ("D", "O")}


@every_major
def test_logical_messages_are_recognised_and_ignored_inside_and_outside_a_transaction(major: int) -> None:
    messages = GOLDEN[major]["messages"]
    assert [label(message) for message in messages].count("Message") == 2
    received = transactions(messages)
    assert [[row["task"] for _, row in each.rows] for each in received] == [["with a message"], ["the end"]]


@every_major
def test_keepalives_tell_the_end_of_wal(major: int) -> None:
    received = transactions(GOLDEN[major]["workload"])
    last = decode(GOLDEN[major]["workload"][-1])
    assert isinstance(last, Keepalive)
    assert received[-1].commit is not None
    assert last.wal_end >= received[-1].commit.end_lsn


def test_every_kind_of_message_is_among_the_samples() -> None:
    assert sorted(BY_LABEL) == sorted(
        [
            "Keepalive",
            "Begin",
            "Commit",
            "Relation",
            "Type",
            "Insert",
            "Update",
            "Delete",
            "Truncate",
            "Origin",
            "Message",
        ]
    )


def test_every_message_cut_anywhere_is_a_protocol_error() -> None:
    for sample in SAMPLES:
        sample.decode()
        for length in range(len(sample.message)):
            with pytest.raises(ProtocolError):
                decode(sample.message[:length], sample.column_count)


@pytest.mark.parametrize("extra", [b"\0", b"t", b"\xff"])
def test_every_message_with_a_byte_more_is_a_protocol_error(extra: bytes) -> None:
    for sample in SAMPLES:
        with pytest.raises(ProtocolError):
            decode(sample.message + extra, sample.column_count)


def test_an_insert_with_another_number_of_columns_than_its_relation_is_a_protocol_error() -> None:
    sample = BY_LABEL["Insert"]
    for count in (0, sample.column_count - 1, sample.column_count + 1):
        with pytest.raises(ProtocolError, match=f"{count}$"):
            decode_insert(sample.message, count, START)


def test_a_message_of_an_unknown_type_is_a_protocol_error_that_names_it() -> None:
    # Stream start and stop, prepare, and what does not exist.
    for tag in b"SEcAbPKrpz\0":
        with pytest.raises(ProtocolError, match=f"unknown type {tag}"):
            check_ignored(bytes([tag]) + bytes(40))


DECODERS: list[Callable[[bytes], object]] = [
    decode_keepalive,
    decode_begin,
    decode_commit,
    decode_relation,
    relation_oid,
    check_ignored,
    lambda message: decode_insert(message, 6),
]


def decodes_or_protocol_error(message: bytes, column_count: int) -> None:
    began = time.process_time()
    with contextlib.suppress(ProtocolError):
        decode(message, column_count)
    assert time.process_time() - began < 0.5


@given(st.binary(max_size=200))
def test_random_bytes_give_a_value_or_a_protocol_error(message: bytes) -> None:
    for decoder in DECODERS:
        with contextlib.suppress(ProtocolError):
            decoder(message)


@given(
    st.sampled_from(b"wk"), st.binary(min_size=24, max_size=24), st.sampled_from(b"BCDIMORTUY"), st.binary(max_size=99)
)
def test_random_bytes_behind_a_true_frame_give_a_value_or_a_protocol_error(
    frame: int, head: bytes, tag: int, tail: bytes
) -> None:
    decodes_or_protocol_error(bytes([frame]) + head + bytes([tag]) + tail, 6)


@settings(max_examples=1000)
@given(st.sampled_from(SAMPLES), st.data())
def test_damaged_messages_give_a_value_or_a_protocol_error(sample: Sample, data: st.DataObject) -> None:
    damaged = bytearray(sample.message)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
    decodes_or_protocol_error(bytes(damaged), sample.column_count)


@pytest.mark.parametrize("length", [0xFFFF_FFFF, 0x7FFF_FFFF, 0x8000_0000])
def test_a_length_that_lies_is_a_protocol_error_and_costs_nothing(length: int) -> None:
    lie = length.to_bytes(4, "big")
    insert = b"I" + bytes(4) + b"N\0\1t" + lie + b"abc"
    truncate = b"T" + lie + b"\0" + bytes(8)
    message = b"M\0" + bytes(8) + b"golden\0" + lie + b"abc"
    update = b"U" + bytes(4) + b"N\0\1t" + lie + b"abc"
    relation = b"R" + bytes(4) + b"public\0outbox\0d\xff\xff" + b"\1id\0" + bytes(8)
    began = time.process_time()
    with pytest.raises(ProtocolError):
        decode_insert(insert, 1)
    with pytest.raises(ProtocolError):
        decode_relation(relation)
    for ignored in (truncate, message, update):
        with pytest.raises(ProtocolError):
            check_ignored(ignored)
    assert time.process_time() - began < 0.1
