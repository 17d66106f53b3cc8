"""The hot path from golden bytes to what the producer is given. The producer is scripted; all else is real."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from cdc_outbox.errors import ProtocolError
from cdc_outbox.event import RecordFormat
from cdc_outbox.inflight import InFlight
from cdc_outbox.kafka import KafkaProducer
from cdc_outbox.pgoutput import Relation
from cdc_outbox.reader import Held, Reader
from cdc_outbox.topic_gate import TopicGate
from cdc_outbox.visibility import VisibilityGate
from tests.golden.capture import MAJORS
from tests.unit.golden_stream import GOLDEN, START, transactions

EVERYTHING_IS_VISIBLE = "1000000:1000000:"


class Script:
    """Messages in, records out. `room` is how many records the queue still takes; `deliver` empties it."""

    def __init__(self, messages: list[bytes], snapshot: str = EVERYTHING_IS_VISIBLE, room: int = 1_000_000) -> None:
        self.messages = iter(messages)
        self.room = room
        self.records: list[tuple[str, bytes | None, bytes | None]] = []
        self.reports: list[Callable[[None, None], None]] = []
        self.ledger = InFlight()
        self.gate = VisibilityGate()
        if snapshot:
            self.gate.learn(snapshot)
        self.reader = Reader(
            lambda: next(self.messages, None),
            cast(KafkaProducer, self),
            self.ledger,
            self.gate,
            TopicGate(cast(KafkaProducer, self), {"outbox": 1 << 30}, lambda: None),
            RecordFormat(),
            is_ours=self.is_ours,
            set_aside=lambda *_: pytest.fail("no row of these is to be set aside"),
        )

    @staticmethod
    def is_ours(relation: Relation) -> bool:
        return (relation.namespace, relation.name) == ("public", "outbox")

    def produce(self, topic: str, value: bytes | None, key: bytes | None, *rest: Any) -> None:
        if not self.room:
            raise BufferError
        self.room -= 1
        self.records.append((topic, value, key))
        self.reports.append(rest[1])

    queue_limit = 0

    def __len__(self) -> int:
        return len(self.reports)

    def deliver(self) -> None:
        for report in self.reports:
            report(None, None)
        self.room += len(self.reports)
        self.reports.clear()

    def read_all(self) -> None:
        while self.reader.read(only_finish=False):
            pass


def expected_records(major: int) -> list[tuple[str, bytes | None, bytes | None]]:
    rows = [
        row for each in transactions(GOLDEN[major]["workload"]) for name, row in each.rows if name == "public.outbox"
    ]
    return [("outbox", text(row["args"]), text(row["task"] if row["key"] is None else row["key"])) for row in rows]


def text(value: str | None) -> bytes | None:
    return None if value is None else value.encode()


@pytest.mark.parametrize("major", MAJORS)
def test_the_rows_of_our_table_are_produced_in_order_and_nothing_else(major: int) -> None:
    script = Script(GOLDEN[major]["workload"])
    script.read_all()
    assert script.records == expected_records(major)
    assert script.records[0] == ("outbox", b"{}", b"default")
    assert len(script.records) == 19


@pytest.mark.parametrize("major", MAJORS)
def test_the_end_is_confirmable_once_all_is_delivered_and_not_before(major: int) -> None:
    script = Script(GOLDEN[major]["workload"])
    script.read_all()
    script.ledger.advance()
    first = transactions(GOLDEN[major]["workload"])[0]
    assert script.ledger.confirmable <= first.begin.final_lsn
    script.deliver()
    script.ledger.advance()
    assert script.ledger.confirmable == script.reader.received_lsn > first.begin.final_lsn
    assert script.ledger.idle


@pytest.mark.parametrize("major", MAJORS)
def test_a_full_queue_holds_the_row_and_loses_and_repeats_none(major: int) -> None:
    script = Script(GOLDEN[major]["workload"], room=1)
    script.read_all()
    turns = 0
    while script.reader.held is Held.QUEUE_FULL:
        turns += 1
        script.deliver()
        script.read_all()
    assert turns == 18
    assert script.records == expected_records(major)


def test_a_row_that_an_empty_queue_does_not_take_is_set_aside() -> None:
    script = Script(GOLDEN[18]["workload"], room=0)
    with pytest.raises(pytest.fail.Exception, match="set aside"):
        script.read_all()


def test_nothing_is_produced_before_its_transaction_is_visible() -> None:
    messages = GOLDEN[18]["workload"]
    xid = transactions(messages)[0].begin.xid
    script = Script(messages, snapshot=f"{xid}:{xid + 1}:{xid}")
    script.read_all()
    assert script.reader.held is Held.NOT_VISIBLE
    assert script.records == []
    script.gate.learn(EVERYTHING_IS_VISIBLE)
    script.read_all()
    assert script.records == expected_records(18)


@pytest.mark.parametrize("length", range(1, START + 1))
def test_a_message_without_its_whole_frame_is_a_protocol_error(length: int) -> None:
    begin = next(message for message in GOLDEN[18]["workload"] if message[0] == ord("w"))
    with pytest.raises(ProtocolError):
        Script([begin[:length]]).read_all()


def test_a_message_of_another_frame_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        Script([b"x" + GOLDEN[18]["workload"][-1][1:]]).read_all()


def test_a_row_before_its_relation_is_a_protocol_error() -> None:
    messages = [message for message in GOLDEN[18]["workload"] if message[START : START + 1] != b"R"]
    with pytest.raises(ProtocolError, match="before its Relation"):
        Script(messages).read_all()


def test_a_row_outside_a_transaction_is_a_protocol_error() -> None:
    messages = [message for message in GOLDEN[18]["workload"] if message[START : START + 1] in (b"R", b"I")]
    with pytest.raises(ProtocolError, match="outside a transaction"):
        Script(messages).read_all()
