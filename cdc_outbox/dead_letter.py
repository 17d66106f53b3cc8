"""Rows that Kafka will never take, set aside by `--on-poison dead-letter`.

Only a row that can never be sent comes here; a broker that is merely away, a missing topic, a missing permission or
a timeout is retried for ever. The insert is committed before the row's position is confirmed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cdc_outbox.archive import as_array
from cdc_outbox.errors import PreconditionError
from cdc_outbox.lsn import format_lsn
from cdc_outbox.objects import Objects, columns
from cdc_outbox.query import Queries, Row
from cdc_outbox.statements import identifier, literal


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """`row` is the whole row as a JSON object of text values. (commit_lsn, ordinal) is its identity in the slot."""

    commit_lsn: int
    ordinal: int
    row_id: str
    task: str
    row: str
    topic: str | None
    error: str
    size: int | None
    size_limit: int | None

    def describe(self) -> str:
        """For the operator: id, task, size and limit; never a key or a value."""
        size = f", {self.size} bytes" if self.size is not None else ""
        limit = f", limit {self.size_limit} bytes" if self.size_limit is not None else ""
        return f"row id={self.row_id} task={self.task}{size}: {self.error}{limit}"

    def parameters(self) -> list[object]:
        return [
            format_lsn(self.commit_lsn),
            self.ordinal,
            self.row_id,
            self.task,
            self.row,
            self.topic,
            self.error,
            self.size,
            self.size_limit,
        ]


def insert_sql(objects: Objects) -> str:
    """Parameters as `DeadLetter.parameters` gives them. A repeat after a restart adds nothing."""
    return (
        f"insert into {objects.dead_letter}"
        ' (slot_name, commit_lsn, ordinal, row_id, task, "row", topic, error, size, size_limit)'
        f" values ({literal(objects.slot)}, $1::pg_lsn, $2::int, $3, $4, $5::jsonb, $6, $7, $8::bigint, $9::bigint)"
        " on conflict (slot_name, commit_lsn, ordinal) do nothing"
    )


_LIST = """
select to_jsonb(l) - 'row' from {dead_letter} l order by id"""

_CHOSEN = """
where ($1::jsonb is null or row_id in (select jsonb_array_elements_text($1::jsonb)))
  and ($2::jsonb is null or task in (select jsonb_array_elements_text($2::jsonb)))"""

_KEYS = """
select distinct key from (select "row" from {dead_letter} {chosen}) l, jsonb_object_keys(l."row") key"""

# A row may still stand in the table under its id, if no purge came by: it goes and comes back in one statement, as in
# requeue.sql. Of two letters with one id (a row that was requeued) one row is made.
_RETRY = """
with chosen as (
    delete from {dead_letter} {chosen} returning id, "row"
), letters as (
    select distinct on ("row"->>{id_key}) id, "row" from chosen order by "row"->>{id_key}, id desc
), gone as (
    delete from {outbox} o using letters l where o.{id} = (l."row"->>{id_key})::{id_type} returning 1
), back as (
    insert into {outbox} ({names}) overriding system value
    select {values} from letters l cross join (select count(*) from gone) after_them order by l.id returning 1
)
select count(*) from back"""

_DISCARD = """
with chosen as (delete from {dead_letter} {chosen} returning 1) select count(*) from chosen"""


@dataclass(slots=True)
class DeadLetters:
    """What an operator does with them. `ids` are the rows' own; with neither `ids` nor `tasks`, all are meant."""

    queries: Queries
    objects: Objects
    id_column: str = "id"

    def all(self) -> list[dict[str, Any]]:
        """Without the rows themselves, which may hold secrets."""
        rows = self.queries.call(_LIST.format(dead_letter=self.objects.dead_letter), doing="reading dead letters")
        return [json.loads(row[0] or "{}") for row in rows]

    def retry(self, ids: Sequence[str], tasks: Sequence[str]) -> int:
        """Stage the rows again under their own ids, all or none; how many."""
        keys = {row[0] for row in self._call(_KEYS, ids, tasks, "reading dead letters")}
        if not keys:
            return 0
        table = {column.name: column for column in columns(self.queries, self.objects) if not column.generated}
        if self.id_column not in keys & table.keys():
            raise PreconditionError(
                f"the rows have no column {self.id_column}", "name the one that is the id with --column id=NAME"
            )
        known = [column for column in table.values() if column.name in keys]
        return self._count(
            _RETRY,
            ids,
            tasks,
            "staging dead letters",
            outbox=self.objects.outbox,
            id=identifier(self.id_column),
            id_key=literal(self.id_column),
            id_type=table[self.id_column].type,
            names=", ".join(identifier(column.name) for column in known),
            values=", ".join(f'(l."row"->>{literal(column.name)})::{column.type}' for column in known),
        )

    def discard(self, ids: Sequence[str], tasks: Sequence[str]) -> int:
        return self._count(_DISCARD, ids, tasks, "discarding dead letters")

    def _count(self, query: str, ids: Sequence[str], tasks: Sequence[str], doing: str, **names: str) -> int:
        return int(self._call(query, ids, tasks, doing, **names)[0][0] or 0)

    def _call(self, query: str, ids: Sequence[str], tasks: Sequence[str], doing: str, **names: str) -> list[Row]:
        statement = query.format(dead_letter=self.objects.dead_letter, chosen=_CHOSEN, **names)
        return self.queries.call(statement, [as_array(ids), as_array(tasks)], doing=doing)


def as_line(letter: dict[str, Any]) -> str:
    size = f", {letter['size']} bytes" if letter["size"] is not None else ""
    limit = f", limit {letter['size_limit']} bytes" if letter["size_limit"] is not None else ""
    where = f", for topic {letter['topic']}" if letter["topic"] is not None else ""
    return (
        f"row id={letter['row_id']} task={letter['task']}{size}: {letter['error']}{limit}{where},"
        f" set aside {letter['created_at']}"
    )
