import contextlib
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_outbox.errors import PreconditionError
from cdc_outbox.event import Layout, RecordFormat, UnsendableRow, legal_topic, own_headers, topic_columns
from cdc_outbox.pgoutput import Column, Relation

TEXT, BYTEA, JSONB = 25, 17, 3802
COLUMNS = ["id", "task", "args", "key", "headers", "created_at"]
AT_2024 = 757_382_400_000_000  # 2024-01-01 in Postgres's microseconds
ROW: list[bytes | None] = [b"7", b"send_mail", b'{"price": 1.10}', None, None, b"2024-01-01 00:00:00+00"]


def layout(
    *,
    names: Sequence[str] = COLUMNS,
    args_type: int = JSONB,
    topic: str = "outbox",
    columns: dict[str, str] | None = None,
    cloudevents: bool = False,
) -> Layout:
    chosen = RecordFormat(topic, columns, cloudevents, "/shop")
    args = chosen.column("args")
    described = tuple(Column(name, args_type if name == args else TEXT) for name in names)
    return Layout(Relation(16384, "app", "outbox", described), chosen)


def row(**changes: bytes | None) -> list[bytes | None]:
    return list({**dict(zip(COLUMNS, ROW, strict=True)), **changes}.values())


def test_a_row_becomes_topic_key_value_and_headers() -> None:
    made = layout()
    shared = made.transaction_headers(0x1_0000_00A0, AT_2024)
    assert made.record(ROW, shared) == (
        "outbox",
        b"send_mail",
        b'{"price": 1.10}',
        [("id", b"7"), ("task", b"send_mail"), ("commit_lsn", b"1/A0")],
    )


@pytest.mark.parametrize(
    ("key", "expected"),
    [(None, b"send_mail"), (b"customer 5", b"customer 5"), (b"", b""), ("größe".encode(), "größe".encode())],
)
def test_the_key_is_the_rows_own_or_else_its_task(key: bytes | None, expected: bytes) -> None:
    assert layout().record(row(key=key), [])[1] == expected


@pytest.mark.parametrize(
    "args",
    [b'{"price": 1.10}', b"1e400", b"123456789012345678901234567890", '"é✓𝄞"'.encode(), b"null", b'""', b"", b"{}"],
)
def test_the_value_is_the_bytes_that_postgres_printed(args: bytes) -> None:
    assert layout().record(row(args=args), [])[2] == args


def test_null_args_are_a_null_value() -> None:
    assert layout().record(row(args=None), [])[2] is None
    assert layout(args_type=BYTEA).record(row(args=None), [])[2] is None


@pytest.mark.parametrize("value", [b"", b"\0\1\xff", b"plain"])
def test_bytea_args_are_sent_as_their_bytes(value: bytes) -> None:
    printed = b"\\x" + value.hex().encode()
    assert layout(args_type=BYTEA).record(row(args=printed), [])[2] == value


def test_a_text_column_that_looks_like_bytea_is_left_alone() -> None:
    assert layout(args_type=TEXT).record(row(args=b"\\x00ff"), [])[2] == b"\\x00ff"


def test_the_rows_own_headers_follow_the_relays() -> None:
    own = '{"traceparent": "00-4bf9", "größe": "✓", "none": null, "empty": ""}'.encode()
    assert layout().record(row(headers=own), [("commit_lsn", b"0/1")])[3] == [
        ("id", b"7"),
        ("task", b"send_mail"),
        ("commit_lsn", b"0/1"),
        ("traceparent", b"00-4bf9"),
        ("größe", "✓".encode()),
        ("none", None),
        ("empty", b""),
    ]


def test_one_rows_headers_do_not_leak_into_the_next_row() -> None:
    made = layout()
    shared = made.transaction_headers(0xA0, AT_2024)
    made.record(row(headers=b'{"a": "b"}'), shared)
    assert made.record(ROW, shared)[3] == [("id", b"7"), ("task", b"send_mail"), ("commit_lsn", b"0/A0")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"{}", []),
        (b'{"n": 1.10}', [("n", b"1.10")]),
        (b'{"n": 123456789012345678901}', [("n", b"123456789012345678901")]),
        (b'{"b": true}', [("b", b"true")]),
        (b'{"l": ["a"]}', [("l", b'["a"]')]),
    ],
)
def test_other_scalars_in_headers_go_as_their_json_text(text: bytes, expected: list[tuple[str, bytes]]) -> None:
    assert own_headers(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b'"a"',
        b"1",
        b"null",
        b"",
        b"{",
        b"\xff",
        b'{"a": "\\ud800"}',  # a json column, other than jsonb, can hold half of a surrogate pair,
        b'{"\\ud800": "a"}',  # which kills the process in confluent-kafka when it is a name
        b'{"a\\u0000b": "x"}',
        b"[" * 100_000,
    ],
)
def test_headers_that_cannot_be_sent_make_the_row_unsendable(text: bytes) -> None:
    with pytest.raises(UnsendableRow, match="headers"):
        layout().record(row(headers=text), [])


@given(st.binary() | st.text(alphabet='{}[]":,\\u0d81 ').map(str.encode))
def test_any_bytes_are_headers_or_unsendable(text: bytes) -> None:
    with contextlib.suppress(UnsendableRow):
        own_headers(text)


def test_cloudevents_take_the_binary_bindings_headers() -> None:
    made = layout(cloudevents=True)
    shared = made.transaction_headers(0x1_0000_00A0, AT_2024 + 1)
    own = b'{"traceparent": "00-1"}'
    topic, key, value, headers = made.record(row(key=b"k", headers=own), shared)
    assert (topic, key, value) == ("outbox", b"k", b'{"price": 1.10}')
    assert headers == [
        ("ce_id", b"7"),
        ("ce_type", b"send_mail"),
        ("ce_specversion", b"1.0"),
        ("ce_source", b"/shop"),
        ("ce_time", b"2024-01-01T00:00:00.000001Z"),
        ("ce_commitlsn", b"1/A0"),
        ("content-type", b"application/json"),
        ("ce_partitionkey", b"k"),
        ("traceparent", b"00-1"),
    ]


def test_cloudevents_of_bytea_args_are_an_octet_stream() -> None:
    headers = dict(layout(cloudevents=True, args_type=BYTEA).transaction_headers(1, AT_2024))
    assert headers["content-type"] == b"application/octet-stream"


def test_cloudevents_before_the_year_2000_have_a_time_too() -> None:
    headers = dict(layout(cloudevents=True).transaction_headers(1, -1_000_000))
    assert headers["ce_time"] == b"1999-12-31T23:59:59.000000Z"


def test_the_topic_may_name_columns() -> None:
    names = [*COLUMNS, "region"]
    made = layout(names=names, topic="jobs.{region}.{task}-v1")
    assert made.record([*ROW, b"eu"], [])[0] == "jobs.eu.send_mail-v1"


def test_task_in_a_topic_is_the_column_that_plays_the_task() -> None:
    names = ["id", "aggregatetype", "aggregateid", "type", "payload"]
    roles = {"task": "type", "args": "payload", "key": "aggregateid"}
    made = layout(names=names, columns=roles, topic="{aggregatetype}.{task}")
    values = [b"7", b"order", b"42", b"OrderPlaced", b"{}"]
    assert made.record(values, []) == (
        "order.OrderPlaced",
        b"42",
        b"{}",
        [("id", b"7"), ("task", b"OrderPlaced")],
    )


@pytest.mark.parametrize("task", [b"", b"a b", b"a/b", "größe".encode(), b"x" * 250, b".", b".."])
def test_a_topic_with_an_illegal_name_makes_the_row_unsendable(task: bytes) -> None:
    with pytest.raises(UnsendableRow, match="topic"):
        layout(topic="{task}").record(row(task=task), [])


def test_a_topic_column_that_is_null_makes_the_row_unsendable_and_is_named() -> None:
    with pytest.raises(UnsendableRow, match="key"):
        layout(topic="{key}").record(ROW, [])


@pytest.mark.parametrize("template", ["{}", "{task", "task}", "{task!r}", "{task:>9}", "{0:}{"])
def test_a_malformed_topic_template_is_a_value_error(template: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the words are string.Formatter's
        topic_columns(template)


def test_the_columns_of_a_topic_template_are_listed_in_order() -> None:
    assert topic_columns("a.{task}.{region}") == ["task", "region"]
    assert topic_columns("plain") == []


@pytest.mark.parametrize(
    ("name", "legal"),
    [("a", True), ("A.b_c-9", True), ("x" * 249, True), ("x" * 250, False), ("", False), (".", False), ("a\n", False)],
)
def test_a_topics_name_follows_kafkas_rules(name: str, legal: bool) -> None:
    assert legal_topic(name) is legal


def test_key_and_headers_may_be_absent() -> None:
    made = layout(names=["args", "extra", "task", "id"])
    assert made.record([b"{}", b"ignored", b"t", b"1"], []) == ("outbox", b"t", b"{}", [("id", b"1"), ("task", b"t")])


def test_columns_are_found_by_name_whatever_their_order() -> None:
    made = layout(names=COLUMNS[::-1])
    assert made.record(row(key=b"k")[::-1], []) == layout().record(row(key=b"k"), [])


def test_every_missing_column_is_named() -> None:
    with pytest.raises(PreconditionError, match=r"app\.outbox has no column id, task, payload, region$"):
        layout(names=["key", "args"], columns={"args": "payload"}, topic="{region}.{task}")


@pytest.mark.parametrize("role", ["key", "headers"])
def test_an_optional_role_that_was_mapped_must_be_there(role: str) -> None:
    with pytest.raises(PreconditionError, match=r"no column elsewhere$"):
        layout(columns={role: "elsewhere"})


def test_a_dead_letter_keeps_the_whole_row_as_text() -> None:
    made = layout()
    kept = json.loads(made.as_json(row(key="größe".encode())))
    assert kept == {
        "id": "7",
        "task": "send_mail",
        "args": '{"price": 1.10}',
        "key": "größe",
        "headers": None,
        "created_at": "2024-01-01 00:00:00+00",
    }


def test_what_an_operator_is_told_about_a_row_is_its_id_task_and_size() -> None:
    made = layout()
    assert (made.row_id(ROW), made.task(ROW), made.size(ROW)) == ("7", "send_mail", 15)
    empty = row(id=None, task=None, args=None)
    assert (made.row_id(empty), made.task(empty), made.size(empty)) == ("NULL", "NULL", 0)


@pytest.mark.parametrize("value", [b"", b"\\", b"00ff", b"\\x0", b"\\x0g", b"\\000\\377", b"\\x\xff"])
def test_bytea_that_is_not_hexadecimal_makes_the_row_unsendable(value: bytes) -> None:
    with pytest.raises(UnsendableRow, match="hexadecimal"):
        layout(args_type=BYTEA).record(row(args=value), [])


def test_bytes_that_are_no_text_make_no_topic_and_are_told_and_kept_all_the_same() -> None:
    made = layout(topic="{task}")
    columns = row(task=b"caf\xe9", id=b"\xff")
    with pytest.raises(UnsendableRow, match="topic"):
        made.record(columns, [])
    assert (made.row_id(columns), made.task(columns)) == ("\\xff", "caf\\xe9")
    assert json.loads(made.as_json(columns))["task"] == "caf\\xe9"


@pytest.mark.parametrize("commit_time", [2**63 - 1, -(2**63), 300_000 * 365 * 86_400_000_000])
def test_a_commit_time_without_a_calendar_makes_an_event_without_a_time(commit_time: int) -> None:
    headers = dict(layout(cloudevents=True).transaction_headers(1, commit_time))
    assert "ce_time" not in headers
    assert headers["ce_specversion"] == b"1.0"
