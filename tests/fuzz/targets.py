"""What is fuzzed: for each target one function of bytes, which raises if a promise is broken.

The same functions run under hypothesis in `make test` and, guided by coverage, in `make fuzz`.
"""

import contextlib
import io
from collections.abc import Callable, Mapping
from typing import Any, cast

from cdc_outbox.config import seconds
from cdc_outbox.errors import PreconditionError, ProtocolError
from cdc_outbox.event import Layout, RecordFormat, UnsendableRow, legal_topic, own_headers, topic_columns
from cdc_outbox.history import History
from cdc_outbox.http import _pages
from cdc_outbox.inflight import InFlight
from cdc_outbox.kafka import KafkaProducer
from cdc_outbox.lsn import format_lsn, parse_lsn
from cdc_outbox.metrics import Figures
from cdc_outbox.pgoutput import Column, Relation, check_ignored, decode_insert, decode_relation, relation_oid
from cdc_outbox.reader import Reader
from cdc_outbox.statements import fill
from cdc_outbox.topic_gate import TopicGate
from cdc_outbox.visibility import VisibilityGate
from cdc_outbox.walsender import decode_keepalive
from tests.unit.golden_stream import decode

Target = Callable[[bytes], None]

BYTEA, JSONB, TEXT = 17, 3802, 25
MOST_FRAMES = 200


def message(data: bytes) -> None:
    """One message of the wire; the first two bytes say how many columns its Relation would have had."""
    count, frame = int.from_bytes(data[:2], "big"), data[2:]
    with contextlib.suppress(ProtocolError):
        found = decode(frame, count)
        if isinstance(found, list):
            assert len(found) == count
            assert sum(len(value) for value in found if value is not None) <= len(frame)
    for decoder in (decode_keepalive, decode_relation, relation_oid, check_ignored):
        with contextlib.suppress(ProtocolError):
            decoder(frame)
    with contextlib.suppress(ProtocolError):
        decode_insert(frame, count)


class Collector:
    """A producer and its records; every third record finds the queue full once."""

    queue_limit = own_size_limit = 1 << 20

    def __init__(self) -> None:
        self.records = 0
        self.reports: list[Callable[[None, None], None]] = []
        self._full = False

    def produce(self, topic: str, value: bytes | None, key: bytes | None, *rest: Any) -> None:
        if self.records % 3 == 2 and not self._full:
            self._full = True
            raise BufferError
        self._full = False
        assert legal_topic(topic)
        check_headers(rest[4])
        self.records += 1
        self.reports.append(rest[1])

    def __len__(self) -> int:
        return max(1, len(self.reports))

    def deliver(self) -> None:
        for report in self.reports:
            report(None, None)
        self.reports.clear()


class EverythingIsVisible(VisibilityGate):
    def visible(self, xid: int) -> bool:
        return True


class EveryTopicIsOpen(TopicGate):
    def open(self, topic: str) -> bool:
        return True


def stream(data: bytes) -> None:
    """Messages one after the other, each behind its length, into the hot path: nothing is confirmed that was not both
    committed and delivered, and nothing is skipped but with a ProtocolError."""
    frames = iter(cut(data))
    collector, ledger = Collector(), InFlight()
    reader = Reader(
        lambda: next(frames, None),
        cast(KafkaProducer, collector),
        ledger,
        EverythingIsVisible(),
        EveryTopicIsOpen(cast(KafkaProducer, collector), {}, lambda: None),
        RecordFormat(topic="jobs.{task}", cloudevents=len(data) % 2 == 0),
        is_ours=lambda relation: relation.name == "outbox",
        set_aside=lambda transaction, letter: setattr(transaction, "unacknowledged", transaction.unacknowledged - 1),
    )
    with contextlib.suppress(ProtocolError, PreconditionError):
        for _ in range(10 * MOST_FRAMES):
            more, before = reader.read(only_finish=False), ledger.confirmable
            collector.deliver()
            ledger.advance()
            assert before <= ledger.confirmable <= reader.received_lsn
            if not more and reader.held is None:
                return
        raise AssertionError("it does not get on")


def cut(data: bytes) -> list[bytes]:
    """Pieces, each behind two bytes of length; none is empty, since libpq hands over none."""
    pieces: list[bytes] = []
    position = 0
    while position + 2 < len(data) and len(pieces) < MOST_FRAMES:
        end = position + 2 + int.from_bytes(data[position : position + 2], "big")
        pieces.append(data[position + 2 : end])
        position = end
    return [piece for piece in pieces if piece]


def join(pieces: list[bytes]) -> bytes:
    return b"".join(len(piece).to_bytes(2, "big") + piece for piece in pieces)


NAMES = ("id", "task", "args", "key", "headers")
FORMATS = [
    RecordFormat(topic, {"args": "args"}, cloudevents, headers=headers)
    for topic in ("outbox", "jobs.{task}.{key}")
    for cloudevents in (False, True)
    for headers in (None, {"kind": "task"})
]


def row(data: bytes) -> None:
    """A row's columns, each behind a byte that says whether it is NULL, become a record or an UnsendableRow."""
    choice, columns = (data[0] if data else 0), [piece[1:] if piece[0] & 1 else None for piece in cut(data[1:])]
    columns += [None] * (len(NAMES) - len(columns))
    for args_type in (JSONB, BYTEA):
        described = tuple(Column(name, args_type if name == "args" else TEXT) for name in NAMES)
        layout = Layout(Relation(1, "public", "outbox", described), FORMATS[choice % len(FORMATS)])
        shared = layout.transaction_headers(1, int.from_bytes(data[:8], "big", signed=True))
        with contextlib.suppress(UnsendableRow):
            topic, key, value, headers = layout.record(columns[: len(NAMES)], shared)
            assert legal_topic(topic)
            assert key is None or isinstance(key, bytes)
            assert value is None or isinstance(value, bytes)
            check_headers(headers)
        # What is said of a row that cannot be sent must be sayable too.
        for text in (layout.row_id(columns), layout.task(columns), layout.as_json(columns[: len(NAMES)])):
            text.encode()
    with contextlib.suppress(UnsendableRow):
        check_headers(own_headers(data))


def check_headers(headers: Any) -> None:
    """What confluent-kafka takes without dying of it."""
    for name, value in headers:
        name.encode()  # an empty one is legal
        assert "\0" not in name
        assert value is None or isinstance(value, bytes)


class Socket:
    """A client's whole request; what it was answered."""

    def __init__(self, request: bytes) -> None:
        self.request = io.BytesIO(request)
        self.answer = b""

    def makefile(self, mode: str, buffering: int = -1) -> io.BytesIO:
        return self.request

    def sendall(self, data: bytes) -> None:
        self.answer += bytes(data)

    def settimeout(self, seconds: float | None) -> None:
        pass

    def setsockopt(self, *_: object) -> None:
        pass


_FIGURES = Figures("slot")
_HANDLER = _pages(_FIGURES, History(_FIGURES), lambda: None, 30.0)
LONGEST_ANSWER = 1 << 20


def request(data: bytes) -> None:
    """A request to the metrics server: an answer of HTTP or none, and never anything else than its pages."""
    client = Socket(data)
    _HANDLER(cast(Any, client), ("127.0.0.1", 1), cast(Any, None))
    # HTTP/0.9 has no status line: it gets the page itself.
    assert len(client.answer) < LONGEST_ANSWER
    assert b"root:" not in client.answer


def text(data: bytes) -> None:
    """What people type."""
    typed = data.decode(errors="replace").replace("\0", "")  # which options.py refuses
    with contextlib.suppress(ValueError):
        assert parse_lsn(format_lsn(parse_lsn(typed))) == parse_lsn(typed)
    with contextlib.suppress(ValueError):
        assert seconds(typed) >= 0
    with contextlib.suppress(ValueError):
        topic_columns(typed)
    with contextlib.suppress(KeyError):
        fill(typed, {"a": typed, "b": [typed, "c"]})
    with contextlib.suppress(ProtocolError):
        VisibilityGate().learn(typed)


TARGETS: Mapping[str, Target] = {
    "message": message,
    "stream": stream,
    "row": row,
    "request": request,
    "text": text,
}
