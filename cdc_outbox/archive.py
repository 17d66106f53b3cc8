"""Rows that were relayed, kept for a while (`--archive`), and staged again from there (`replay`).

A row moves in the statement that deletes it: whatever dies, it is in one place. A replayed row is a new one, with a new
id and the header `replay_of`: a worker that remembers ids does it again, and can see why.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from cdc_outbox.errors import ConfigError, PreconditionError
from cdc_outbox.objects import Column, Objects, columns
from cdc_outbox.query import LONG_SECONDS, Queries
from cdc_outbox.statements import identifier

REPLAY_OF = "replay_of"

TRIM = """
with trimmed as (
    delete from {archive} where archived_at < now() - make_interval(secs => $1::float8) and ctid = any(array(
        select ctid from {archive} where archived_at < now() - make_interval(secs => $1::float8) limit $2::int))
    returning 1
) select count(*) from trimmed"""

_DELETE = """
with relayed as materialized (
    select tableoid, ctid from {outbox} where ctid = any($1::tid[]) and xmin = any($2::xid[]) for update skip locked
), purged as (
    delete from {outbox} o using relayed r where o.tableoid = r.tableoid and o.ctid = r.ctid returning {returning}
)"""

_BYTES_A_ROW = """
select pg_relation_size(oid)::float8 / reltuples from pg_class where oid = to_regclass($1) and reltuples > 0"""

_CHOSEN = """
from {archive} a
where ($1::timestamptz is null or a.archived_at >= $1::timestamptz)
  and ($2::timestamptz is null or a.archived_at < $2::timestamptz)
  and ($3::jsonb is null or a.{task}::text in (select jsonb_array_elements_text($3::jsonb)))
  and ($4::jsonb is null or a.{id}::text in (select jsonb_array_elements_text($4::jsonb)))"""

_HEADERS = """
(case when jsonb_typeof(a.{headers}::jsonb) = 'object' then a.{headers}::jsonb else '{{}}' end
 || jsonb_build_object('{name}', a.{id}::text))::{type}"""


def deleting(objects: Objects, archived: Sequence[str] | None) -> str:
    """One batch: $1 ctids, $2 xmins; the count. `archived`: the columns that go to the archive, if they are to."""
    if archived is None:
        return _DELETE.format(outbox=objects.outbox, returning="1") + "select count(*) from purged"
    names = ", ".join(map(identifier, archived))
    returning = ", ".join(f"o.{identifier(name)}" for name in archived)
    return (
        f"{_DELETE.format(outbox=objects.outbox, returning=returning)}, kept as (\n"
        f"    insert into {objects.archive} ({names}, archived_at) select {names}, now() from purged returning 1\n"
        ") select count(*) from kept"
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """Which rows of the archive; what is empty does not restrict. `since`, `until`: when they were archived."""

    since: str | None = None
    until: str | None = None
    tasks: Sequence[str] = ()
    ids: Sequence[str] = ()

    def parameters(self) -> list[str | None]:
        return [self.since, self.until, as_array(self.tasks), as_array(self.ids)]


@dataclass(frozen=True, slots=True)
class Roles:
    """The columns that play a part, by name."""

    id: str = "id"
    task: str = "task"
    headers: str = "headers"


@dataclass(slots=True)
class Archive:
    queries: Queries
    objects: Objects
    roles: Roles = field(default_factory=Roles)

    def count(self, choice: Choice) -> int:
        """Raises PreconditionError if there is no archive."""
        return self._call(f"select count(*) {self._chosen()}", choice, "counting archived rows")

    def bytes_a_row(self) -> float | None:
        """On average, if the archive was ever analyzed."""
        rows = self.queries.call(_BYTES_A_ROW, [self.objects.archive], doing="measuring the archive")
        return float(rows[0][0]) if rows and rows[0][0] is not None else None

    def replay(self, choice: Choice) -> int:
        """Stage the rows again, all or none, in their order; how many. The archive keeps them."""
        if choice == Choice():
            raise ConfigError("which rows? give --since, --until, --task or --id")
        roles, table = self.roles, columns(self.queries, self.objects)
        headers = next((column for column in table if column.name == roles.headers), None)
        if headers is None:
            raise PreconditionError(
                f"{self.objects.outbox} has no column {roles.headers}, so that no header could name the old id",
                "add one, or map another with --column headers=NAME",
            )
        # A new row has a new id and its own moment; what Postgres computes, it computes again.
        copied = [column for column in table if not column.generated and not _anew(column, roles)]
        names = ", ".join(identifier(column.name) for column in [*copied, headers])
        values = [f"a.{identifier(column.name)}" for column in copied]
        values.append(
            _HEADERS.format(
                headers=identifier(headers.name), name=REPLAY_OF, id=identifier(roles.id), type=headers.type
            )
        )
        moment = "created_at" if any(column.name == "created_at" for column in table) else "archived_at"
        statement = (
            f"with staged as (insert into {self.objects.outbox} ({names}) select {', '.join(values)} {self._chosen()}"
            f" order by a.{moment}, a.{identifier(roles.id)} returning 1) select count(*) from staged"
        )
        return self._call(statement, choice, "staging archived rows")

    def _chosen(self) -> str:
        roles = self.roles
        return _CHOSEN.format(archive=self.objects.archive, task=identifier(roles.task), id=identifier(roles.id))

    def _call(self, statement: str, choice: Choice, doing: str) -> int:
        rows = self.queries.call(statement, choice.parameters(), doing=doing, seconds=LONG_SECONDS)
        return int(rows[0][0] or 0)


def _anew(column: Column, roles: Roles) -> bool:
    return column.name in (roles.id, roles.headers) or (column.name == "created_at" and column.has_default)


def as_array(values: Sequence[str]) -> str | None:
    """For `jsonb_array_elements_text`; None if there are none."""
    return json.dumps(list(values)) if values else None
