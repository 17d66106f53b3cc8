"""How long has a row been waiting? Asked of the table's ends, by its primary key: two index look-ups, no count. (A
shard's rows are those that its publication sends.)

A row waits if its transaction took its xid after the one that stored the last position in the checkpoint, or in that
one (a requeue): nothing was confirmed since. So the newest row tells whether anything waits. A transaction that wrote
before that store and commits after it is overlooked until a later row comes; the relay itself sees it in the stream. A
row that somebody updates counts as new.
"""

from __future__ import annotations

from dataclasses import dataclass

from cdc_outbox.objects import Objects, published
from cdc_outbox.query import Queries, Row
from cdc_outbox.statements import fill, identifier

# Only a whole number that counts up says which row is the newest.
_ENDS = """
select a.attname, exists (select from pg_attribute c where c.attrelid = i.indrelid and c.attname = 'created_at'
                          and c.atttypid = 'timestamptz'::regtype and not c.attisdropped)
from pg_index i join pg_attribute a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]
where i.indrelid = $1::oid and i.indisprimary and i.indisvalid and a.atttypid in ('int8'::regtype, 'int4'::regtype)"""

AMONG = 10_000
"""Rows at either end, among which those of a shard are sought: another that stands still may have left millions."""

_WAITING = """
select extract(epoch from clock_timestamp() - oldest.created_at),
       case when newest.xid is null then false when k.slot_name is null then true
            else age(newest.xid) <= age(k.xmin) end,
       extract(epoch from clock_timestamp() - greatest(oldest.created_at, k.stored_at))
from (values (1)) one
left join (select {created} as created_at from {first} o where {ours} order by {id} limit 1) oldest on true
left join (select {xid} as xid from {last} o where {ours} order by {id} desc limit 1) newest on true
left join {checkpoint} k on k.slot_name = :'slot'"""


@dataclass(frozen=True, slots=True)
class Waiting:
    """`oldest_seconds`: age of the oldest row in the table. `seconds`: for how long, at most, a row has been waiting
    to be confirmed. None where that cannot be told."""

    oldest_seconds: float | None
    waits: bool
    seconds: float | None


def waiting_sql(queries: Queries, objects: Objects) -> str | None:
    """The question, whose row `parse_waiting` reads; None if this table cannot be asked."""
    rows = queries.call(_ENDS, [objects.oid], doing="reading the table's primary key")
    if not rows:
        return None
    id_column, has_created_at = rows[0]
    id_name, ours = identifier(id_column or ""), published(queries, objects)
    first, last, xid = objects.outbox, objects.outbox, "xmin"
    if ours != "true":
        xid = "cdc_outbox_xid"
        first, last = (
            f"(select *, xmin as {xid} from {objects.outbox} order by {id_name} {order} limit {AMONG})"
            for order in ("asc", "desc")
        )
    return fill(_WAITING, {"slot": objects.slot}).format(
        created="created_at" if has_created_at == "t" else "null::timestamptz",
        first=first,
        last=last,
        xid=xid,
        ours=ours,
        id=id_name,
        checkpoint=objects.checkpoint,
    )


def parse_waiting(row: Row) -> Waiting:
    oldest, waits, seconds = row
    return Waiting(_age(oldest), waits == "t", _age(seconds) if waits == "t" else 0.0)


def _age(text: str | None) -> float | None:
    """Never negative: clocks differ, and an application may set created_at itself."""
    return None if text is None else max(0.0, float(text))
