"""`peek` shows what `stream` would send, and neither takes nor sends anything."""

import json
from typing import Any

import pytest

from tests.fix_kafka import Record
from tests.fix_postgres import Database
from tests.relay_rig import RelayRig
from tests.slot_rig import refusal

CLOUDEVENTS = ("--format", "cloudevents", "--source", "/shop")


def peek(rig: RelayRig, *options: object) -> list[dict[str, Any]]:
    done = rig.command.run("peek", *rig.names, "--topic", rig.topic, *options)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def as_peeked(record: Record, topic: str) -> dict[str, object]:
    """What of a record is told beforehand too."""
    headers = [[name, None if value is None else value.decode()] for name, value in record.headers.items()]
    key, value = (None if part is None else part.decode() for part in (record.key, record.value))
    return {"topic": topic, "key": key, "headers": headers, "value": value}


@pytest.mark.parametrize("options", [(), CLOUDEVENTS], ids=["plain", "cloudevents"])
def test_it_shows_what_the_stream_then_sends(rig: RelayRig, options: tuple[str, ...]) -> None:
    rig.database.execute(
        "insert into outbox (task, args, key, headers) values ('mail', '{\"größe\": 1}', 'k', '{\"h\": \"ü\"}'),"
        " ('mail', '[]', null, null)"
    )
    rig.stage("sms", 3)
    found = peek(rig, *options)
    rig.catch_up(*options)
    assert [{name: row[name] for name in ("topic", "key", "headers", "value")} for row in found] == [
        as_peeked(record, rig.topic) for record in rig.read()
    ]
    assert [row["id"] for row in found] == ["1", "2", "3", "4", "5"]
    assert found[0]["commit_lsn"] == found[1]["commit_lsn"] < found[2]["commit_lsn"]
    assert found[0]["committed_at"].endswith("Z")
    assert peek(rig, *options) == []


def test_it_takes_nothing_and_shows_committed_rows_only(rig: RelayRig) -> None:
    rows = rig.stage("mail", 20)
    with rig.database.connect() as connection:
        connection.execute("begin")
        rig.stage("open", 1, on=connection)
        before = rig.confirmed
        assert peek(rig, "--limit", 20) == peek(rig, "--limit", 20)
        assert [row["id"] for row in peek(rig)] == [str(n) for n in range(1, 11)]
        assert [row["id"] for row in peek(rig, "--limit", 100)] == [str(n) for n in range(1, len(rows) + 1)]
        assert rig.confirmed == before
    assert rig.read() == []


@pytest.mark.parametrize("transactions", [1, 300])
def test_the_limit_counts_rows_whatever_their_transactions(rig: RelayRig, transactions: int) -> None:
    for _ in range(transactions):
        rig.stage("mail", 300 // transactions)
    assert [int(row["id"]) for row in peek(rig, "--limit", 250)] == [*range(1, 251)]


def test_a_row_that_could_not_be_sent_says_why(rig: RelayRig) -> None:
    rig.stage("no topic")
    rig.stage("mail")
    poison, row = peek(rig, "--topic", "jobs.{task}")
    assert (poison["id"], poison["poison"]) == ("1", "its topic would have an illegal name")
    assert row["topic"] == "jobs.mail"


def test_bytes_are_shown_as_they_are_sent(rig: RelayRig, database: Database) -> None:
    rig.database.execute("alter table outbox alter args drop default, alter args type bytea using null")
    rig.database.execute("insert into outbox (task, args) values ('t', '\\x6869ff')")
    assert [row["value"] for row in peek(rig)] == ["hi\\xff"]


def test_while_a_relay_streams_it_names_the_holder(rig: RelayRig) -> None:
    relay = rig.stream()
    refusal(rig.command.run("peek", *rig.names), 6, f"slot {rig.slot} is held by pid ", "read by one at a time")
    assert relay.terminate() == 0


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--slot", "none"), 4, "slot none does not exist"),
        (("--table", "nothing"), 3, "table nothing does not exist"),
        (("--limit", "0"), 2, "--limit"),
        (("--topic", "{task"), 2, "--topic"),
        (("--header", "id=task"), 2, "the relay sets that one"),
    ],
)
def test_what_is_not_there_or_not_legal_is_told_in_one_line(
    rig: RelayRig, options: tuple[str, ...], code: int, words: str
) -> None:
    refusal(rig.command.run("peek", *rig.names, *options), code, words)
