"""One outbox through several slots: shard i of N carries the rows whose Kafka key hashes to i.

Each shard is a slot with a publication of its own, whose row filter the walsender applies; so N relays share the work,
and the rows of one key stay in one slot, in order. Relay and purge know nothing of it: their rows are those that their
publication sends.

The hash is Postgres's own for hash partitions (`hashtextextended`), over the key's bytes (collation "C"). Nothing is
stored that depends on it: every slot judges each row at the same WAL position, so even a hash that changed with a major
would lose nothing (pg_upgrade refuses while a slot has something left to read). md5() would fail where OpenSSL is in
FIPS mode, inside the walsender, for ever.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cdc_outbox.config import Shard
from cdc_outbox.errors import GapError, PreconditionError
from cdc_outbox.event import RecordFormat
from cdc_outbox.objects import Column, Objects, columns, published
from cdc_outbox.query import Queries
from cdc_outbox.statements import identifier

# Without the sign bit: the remainder of a negative number is negative. The hash of NULL is NULL, so the first that is
# none is the key's, else the task's.
_FILTER = "mod(coalesce({hashes}, 0) & 9223372036854775807, {count}) = {remainder}"
_TEXT = 'hashtextextended({name}::text collate "C", 0)'
_NUMBER = "hashint8extended({name}::bigint, 0)"
_HASHES = {
    "text": _TEXT,
    "character varying": _TEXT,
    "character": _TEXT,
    "uuid": "uuid_hash_extended({name}, 0)",
    "bigint": _NUMBER,
    "integer": _NUMBER,
    "smallint": _NUMBER,
}
"""By type. A row filter takes built-in types and immutable functions only: no enum, no domain, no uuid::text."""


def row_filter(shard: Shard, table: Sequence[Column], record_format: RecordFormat) -> str:
    """The condition on the table's rows. Raises PreconditionError for a column whose type no row filter takes."""
    types = {column.name: column.type for column in table}
    names = [record_format.column(role) for role in ("key", "task")]
    hashes = [_hash(name, types[name]) for name in names if name in types]
    if not hashes:
        raise PreconditionError(f"there is no column {names[1]}", "name the task's with --column task=NAME")
    return _FILTER.format(hashes=", ".join(hashes), count=shard.count, remainder=shard.number - 1)


def _hash(name: str, kind: str) -> str:
    pattern = _HASHES.get(re.sub(r"\(.*\)", "", kind))
    if pattern is None:
        raise PreconditionError(
            f"column {name} is of type {kind}: a shard's row filter takes text, varchar, uuid or a whole number",
            "map another column with --column key=NAME, or relay without --shard",
        )
    return pattern.format(name=identifier(name))


def same(found: str, wanted: str) -> bool:
    """Is `found`, as Postgres prints it, what `wanted` said? It adds casts, parentheses and quotes."""
    return _bare(found) == _bare(wanted)


def _bare(condition: str) -> str:
    return re.sub(r"""::\w+|[()\s'"]""", "", condition).replace("COALESCE", "coalesce").replace("COLLATE", "collate")


def require(queries: Queries, objects: Objects, shard: Shard, record_format: RecordFormat) -> None:
    """Raises GapError unless the publication sends this shard's rows, by the column that is the records' key."""
    found = published(queries, objects)
    if not same(found, row_filter(shard, columns(queries, objects), record_format)):
        raise GapError(
            f"publication {objects.publication} sends the rows where {found}, which is not shard {shard} by the key of"
            " these records",
            f"run `cdc-outbox init-slot --shard {shard}` with the same --column as here",
        )
