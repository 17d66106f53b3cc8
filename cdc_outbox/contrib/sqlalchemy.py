"""The tables of `sql/` for SQLAlchemy's MetaData, so that `create_all` makes them and alembic knows them.

    outbox = outbox_table(Base.metadata)

`outbox_checkpoint` and `outbox_dead_letter` belong to the relay: where it keeps them in alembic's schema, leave them
out of autogenerate (`include_name`), which would drop them.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Identity,
    Index,
    MetaData,
    Table,
    Text,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSON, JSONB


def outbox_table(metadata: MetaData, name: str = "outbox", *, schema: str | None = None) -> Table:
    """The application's, as `sql/tables.sql` has it."""
    return Table(
        name,
        metadata,
        Column("id", BigInteger, Identity(always=True), primary_key=True),
        Column("task", Text, nullable=False),
        Column("args", JSONB, nullable=False, server_default=text("'{}'")),
        Column("key", Text),
        # A headers value of None is SQL NULL: the value null is no object.
        Column("headers", JSONB(none_as_null=True)),
        Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
        CheckConstraint("jsonb_typeof(headers) = 'object'", name=f"{name}_headers_check"),
        schema=schema,
    )


def inbox_table(metadata: MetaData, name: str = "inbox", *, schema: str | None = None) -> Table:
    """The worker's, as `sql/inbox.sql` has it."""
    return Table(
        name,
        metadata,
        Column("source", Text, primary_key=True),
        Column("id", Text, primary_key=True),
        Column("step", Text, primary_key=True, server_default=""),
        Column("result", JSON),
        Column("done_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
        Index(f"{name}_done_at", "done_at"),
        schema=schema,
    )
