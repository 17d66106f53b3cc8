"""Rows that Kafka will never take, set aside by `--on-poison dead-letter`.

Only a row that can never be sent comes here; a broker that is merely away, a missing topic, a missing permission or
a timeout is retried for ever. The insert is committed before the row's position is confirmed.
"""

from __future__ import annotations

from dataclasses import dataclass

from cdc_outbox.lsn import format_lsn
from cdc_outbox.objects import Objects


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """`row` is the whole row as a JSON object of text values. (commit_lsn, ordinal) is its identity in the stream."""

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
        ' (commit_lsn, ordinal, row_id, task, "row", topic, error, size, size_limit)'
        " values ($1::pg_lsn, $2::int, $3, $4, $5::jsonb, $6, $7, $8::bigint, $9::bigint)"
        " on conflict (commit_lsn, ordinal) do nothing"
    )
