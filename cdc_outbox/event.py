"""A row of the outbox becomes a Kafka record. PURE.

Columns are found by name in the Relation message that precedes each first change and each change of the table's
shape; columns nobody asked for are never looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from string import Formatter

from cdc_outbox.errors import PreconditionError
from cdc_outbox.lsn import format_lsn
from cdc_outbox.pgoutput import Relation
from cdc_outbox.walsender import POSTGRES_EPOCH_SECONDS

Header = tuple[str, str | bytes | None]
Columns = Sequence[bytes | None]

ROLES = ("id", "task", "args", "key", "headers")
"""What a column can be to the relay; `--column args=payload` gives a role to a column of another name."""
OPTIONAL_ROLES = frozenset({"key", "headers"})
OWN_HEADERS = frozenset({"id", "task", "commit_lsn"})
CLOUDEVENTS_HEADERS = frozenset(
    {"content-type", "ce_specversion"}
    | {f"ce_{name}" for name in ("id", "type", "source", "time", "commitlsn", "partitionkey")}
)

BYTEA_OID = 17
TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")


class UnsendableRow(ValueError):
    """A row from which no legal record can be made, whatever the time or place."""


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """What the operator chose about records; the same for every row."""

    topic: str = "outbox"
    columns: Mapping[str, str] | None = None
    cloudevents: bool = False
    source: str = "/cdc-outbox"
    headers: Mapping[str, str] | None = None
    """Header name -> column: what other routers send as headers, beside our own."""
    bytea_oids: frozenset[int] = frozenset({BYTEA_OID})
    """Types whose values are bytes: bytea, and the domains over it that the database has."""

    def column(self, role: str) -> str:
        return (self.columns or {}).get(role, role)


def topic_columns(template: str) -> list[str]:
    """The column names in a topic template: `jobs.{task}` has one. Raises ValueError if it is malformed."""
    fields = []
    for _, field, spec, conversion in Formatter().parse(template):
        if field is not None:
            if not field or spec or conversion:
                raise ValueError("a placeholder is a column's name in braces")
            fields.append(field)
    return fields


def legal_topic(name: str) -> bool:
    return TOPIC_NAME.fullmatch(name) is not None and name not in (".", "..")


class Layout:
    """Where one Relation keeps what a record is made of. Built once per Relation message; used for every row."""

    __slots__ = (
        "_args",
        "_args_is_bytea",
        "_columns_as_headers",
        "_fields",
        "_headers",
        "_id",
        "_key",
        "_task",
        "_topic",
        "column_count",
        "format",
        "names",
    )

    def __init__(self, relation: Relation, record_format: RecordFormat) -> None:
        """Raises PreconditionError naming each column that the relation lacks."""
        self.format = record_format
        self.names = [column.name for column in relation.columns]
        self.column_count = len(relation.columns)
        mapped = record_format.columns or {}
        wanted = [record_format.column(role) for role in ROLES if role in mapped or role not in OPTIONAL_ROLES]
        fields = topic_columns(record_format.topic)
        # {task} means the column that plays the task, whatever it is called; any other name is a column's own.
        fields = [record_format.column(field) if field in ROLES else field for field in fields]
        as_headers = record_format.headers or {}
        missing = [name for name in dict.fromkeys([*wanted, *fields, *as_headers.values()]) if name not in self.names]
        if missing:
            raise PreconditionError(
                f"table {relation.namespace}.{relation.name} has no column {', '.join(missing)}",
                "put it back, or map another with --column ROLE=NAME; nothing was confirmed past this point",
            )
        position = {name: index for index, name in enumerate(self.names)}
        self._id = position[record_format.column("id")]
        self._task = position[record_format.column("task")]
        self._args = position[record_format.column("args")]
        self._key = position.get(record_format.column("key"))
        self._headers = position.get(record_format.column("headers"))
        self._args_is_bytea = relation.columns[self._args].type_oid in record_format.bytea_oids
        self._fields = [position[field] for field in fields]
        self._columns_as_headers = [(name, position[column]) for name, column in as_headers.items()]
        self._topic = record_format.topic

    def transaction_headers(self, final_lsn: int, commit_time: int) -> list[Header]:
        """The headers that all records of a transaction share."""
        position = format_lsn(final_lsn).encode()
        if not self.format.cloudevents:
            return [("commit_lsn", position)]
        return [
            ("ce_specversion", b"1.0"),
            ("ce_source", self.format.source.encode()),
            *_ce_time(commit_time),
            ("ce_commitlsn", position),
            ("content-type", b"application/octet-stream" if self._args_is_bytea else b"application/json"),
        ]

    def record(self, columns: Columns, shared: list[Header]) -> tuple[str, bytes | None, bytes | None, list[Header]]:
        """(topic, key, value, headers) of one row. Raises UnsendableRow."""
        task = columns[self._task]
        key = task
        if self._key is not None and columns[self._key] is not None:
            key = columns[self._key]
        if self.format.cloudevents:
            headers = [("ce_id", columns[self._id]), ("ce_type", task), *shared]
            if key is not None:
                headers.append(("ce_partitionkey", key))
        else:
            headers = [("id", columns[self._id]), ("task", task), *shared]
        if self._columns_as_headers:
            headers += [(name, columns[place]) for name, place in self._columns_as_headers]
        if self._headers is not None:
            own = columns[self._headers]
            if own is not None:
                headers += own_headers(own)
        value = columns[self._args]
        if self._args_is_bytea and value is not None:
            value = _from_hexadecimal(value)
        return (self._template_topic(columns) if self._fields else self._topic), key, value, headers

    def _template_topic(self, columns: Columns) -> str:
        values = iter(self._fields)
        parts = []
        for literal, field, _, _ in Formatter().parse(self._topic):
            parts.append(literal)
            if field is not None:
                value = columns[next(values)]
                if value is None:
                    raise UnsendableRow(f"column {field} names the topic and is NULL")
                parts.append(value.decode(errors="replace"))
        topic = "".join(parts)
        if not legal_topic(topic):
            raise UnsendableRow("its topic would have an illegal name")
        return topic

    def row_id(self, columns: Columns) -> str:
        return _readable(columns[self._id] or b"NULL")

    def task(self, columns: Columns) -> str:
        return _readable(columns[self._task] or b"NULL")

    def size(self, columns: Columns) -> int:
        """Bytes of the value."""
        return len(columns[self._args] or b"")

    def as_json(self, columns: Columns) -> str:
        """The whole row as an object of text values (null for NULL), as a dead letter keeps it."""
        texts = [None if value is None else _readable(value) for value in columns]
        return json.dumps(dict(zip(self.names, texts, strict=True)))


def _readable(value: bytes) -> str:
    """Postgres sends UTF-8 and checks it; what is said of a row must not depend on that."""
    return value.decode(errors="backslashreplace")


def _from_hexadecimal(value: bytes) -> bytes:
    try:
        if value.startswith(b"\\x"):
            return bytes.fromhex(value[2:].decode())
    except ValueError:
        pass
    raise UnsendableRow("its bytea is not hexadecimal")


def iso_time(commit_time: int) -> str | None:
    """None for a commit time that a replication origin has set, and for which no calendar has a year."""
    try:
        moment = datetime.fromtimestamp(POSTGRES_EPOCH_SECONDS + commit_time / 1_000_000, UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _ce_time(commit_time: int) -> list[Header]:
    """The attribute is optional."""
    time = iso_time(commit_time)
    return [] if time is None else [("ce_time", time.encode())]


def own_headers(text: bytes) -> list[Header]:
    """The row's `headers` column: a JSON object of strings. Other scalars go as their JSON text, null as null."""
    try:
        parsed = json.loads(text, parse_int=str, parse_float=str)
        if not isinstance(parsed, dict):
            raise UnsendableRow("headers is not a JSON object")
        return [(_header_name(name), _header_value(value)) for name, value in parsed.items()]
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnsendableRow):
            raise
        raise UnsendableRow("headers is not a JSON object of strings") from None


def _header_name(name: str) -> str:
    """jsonb holds no such names, but a mapped json column can: confluent-kafka dies of the first kind (a segmentation
    fault, 2.16.1) and cuts the second short."""
    name.encode()  # raises UnicodeEncodeError, a ValueError, for half of a surrogate pair
    if "\0" in name:
        raise UnsendableRow("headers has a name with a zero character")
    return name


def _header_value(value: object) -> bytes | None:
    if value is None:
        return None
    return (value if isinstance(value, str) else json.dumps(value)).encode()
