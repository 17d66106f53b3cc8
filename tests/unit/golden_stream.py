"""A golden stream decoded as the relay does it, into something a test can compare."""

from dataclasses import dataclass, field

from cdc_outbox.errors import ProtocolError
from cdc_outbox.pgoutput import (
    BEGIN,
    COMMIT,
    INSERT,
    RELATION,
    Begin,
    Commit,
    Relation,
    check_ignored,
    decode_begin,
    decode_commit,
    decode_insert,
    decode_relation,
    relation_oid,
)
from cdc_outbox.walsender import XLOG_DATA, XLOG_DATA_HEADER_BYTES, Keepalive, decode_keepalive
from tests.golden.capture import MAJORS, load

START = XLOG_DATA_HEADER_BYTES
GOLDEN = {major: load(major) for major in MAJORS}
"""Major → stream → messages."""

Value = Keepalive | Begin | Commit | Relation | list[bytes | None] | None


@dataclass(frozen=True, slots=True)
class Sample:
    """One message of the wire, and the number of columns that its Relation had."""

    message: bytes
    column_count: int = 0

    def decode(self) -> Value:
        return decode(self.message, self.column_count)


@dataclass(slots=True)
class Received:
    """One transaction: its frame and its inserts as (table, {column: value})."""

    begin: Begin
    rows: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    others: str = ""
    """The tags of the messages that the relay ignores, in order."""
    commit: Commit | None = None


def decode(message: bytes, column_count: int = 0) -> Value:
    if message[:1] != bytes([XLOG_DATA]):
        return decode_keepalive(message)
    match message[START : START + 1]:
        case b"":
            raise ProtocolError("XLogData without a message")
        case tag if tag[0] == BEGIN:
            return decode_begin(message, START)
        case tag if tag[0] == COMMIT:
            return decode_commit(message, START)
        case tag if tag[0] == RELATION:
            return decode_relation(message, START)
        case tag if tag[0] == INSERT:
            return decode_insert(message, column_count, START)
        case _:
            check_ignored(message, START)
            return None


def samples() -> list[Sample]:
    """Every golden message of every major, once."""
    found: dict[Sample, None] = {}
    for streams in GOLDEN.values():
        for messages in streams.values():
            relations: dict[int, Relation] = {}
            for message in messages:
                count = 0
                match message[START : START + 1]:
                    case b"R":
                        relation = decode_relation(message, START)
                        relations[relation.oid] = relation
                    case b"I":
                        count = len(relations[relation_oid(message, START)].columns)
                found[Sample(message, count)] = None
    return list(found)


def transactions(messages: list[bytes]) -> list[Received]:
    """What a golden stream says; every message decoded, none skipped."""
    relations: dict[int, Relation] = {}
    received: list[Received] = []
    for message in messages:
        if message[START : START + 1] == b"I":
            relation = relations[relation_oid(message, START)]
            values = decode_insert(message, len(relation.columns), START)
            texts = [None if value is None else value.decode() for value in values]
            names = [column.name for column in relation.columns]
            row = dict(zip(names, texts, strict=True))
            received[-1].rows.append((f"{relation.namespace}.{relation.name}", row))
            continue
        match decode(message):
            case Begin() as begin:
                received.append(Received(begin))
            case Commit() as commit:
                received[-1].commit = commit
            case Relation() as relation:
                relations[relation.oid] = relation
            case Keepalive():
                pass
            case None:
                received[-1].others += chr(message[START])
            case value:
                raise AssertionError(value)
    return received
