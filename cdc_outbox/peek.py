"""`peek`: what the slot would bring next, as `stream` would produce it. Nothing is taken, and nothing is sent."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

from cdc_outbox.errors import SlotInUse
from cdc_outbox.event import Layout, RecordFormat, UnsendableRow, iso_time
from cdc_outbox.lsn import format_lsn
from cdc_outbox.objects import Objects, bytea_types, require_slot, slot_in_use
from cdc_outbox.pgoutput import (
    BEGIN,
    INSERT,
    RELATION,
    Begin,
    decode_begin,
    decode_insert,
    decode_relation,
    relation_oid,
)
from cdc_outbox.query import LONG_SECONDS, Queries
from cdc_outbox.statements import identifier

MESSAGES_A_ROW = 4
"""Begin, Relation, Insert, Commit."""

# Other tables' WAL is read through, and whole transactions are decoded, however long; no more rows than are wanted come
# here.
_PEEK = """
select data from pg_logical_slot_peek_binary_changes($1, null, $2, 'proto_version', '1', 'publication_names', $3)
limit $2"""


def peek(queries: Queries, objects: Objects, record_format: RecordFormat, limit: int) -> Iterator[str]:
    """At most `limit` rows, in commit order, each a line of JSON. Raises SlotInUse while a relay streams."""
    require_slot(queries, objects.slot)
    queries.call("set bytea_output = hex", doing="preparing")
    record_format = dataclasses.replace(record_format, bytea_oids=bytea_types(queries))
    parameters = [objects.slot, MESSAGES_A_ROW * limit, identifier(objects.publication)]
    try:
        found = queries.call(_PEEK, parameters, doing="reading the slot", seconds=LONG_SECONDS)
    except SlotInUse:
        raise slot_in_use(queries, objects.slot, "a slot is read by one at a time") from None
    begin = Begin(0, 0, 0)
    layouts: dict[int, Layout] = {}
    rows = 0
    for (text,) in found:
        message = bytes.fromhex((text or "").removeprefix("\\x"))
        if message[0] == BEGIN:
            begin = decode_begin(message)
        elif message[0] == RELATION:
            relation = decode_relation(message)
            if relation.oid == objects.oid or (relation.namespace, relation.name) == (objects.schema, objects.table):
                layouts[relation.oid] = Layout(relation, record_format)
        elif message[0] == INSERT and (layout := layouts.get(relation_oid(message))) is not None:
            yield json.dumps(_row(message, layout, begin), ensure_ascii=False)
            rows += 1
            if rows == limit:
                return


def _row(message: bytes, layout: Layout, begin: Begin) -> dict[str, object]:
    columns = decode_insert(message, layout.column_count)
    row: dict[str, object] = {
        "commit_lsn": format_lsn(begin.final_lsn),
        "committed_at": iso_time(begin.commit_time),
        "id": layout.row_id(columns),
    }
    try:
        topic, key, value, headers = layout.record(
            columns, layout.transaction_headers(begin.final_lsn, begin.commit_time)
        )
    except UnsendableRow as error:
        return row | {"poison": str(error)}
    return row | {
        "topic": topic,
        "key": _text(key),
        "headers": [[name, _text(content)] for name, content in headers],
        "value": _text(value),
    }


def _text(value: str | bytes | None) -> str | None:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value
