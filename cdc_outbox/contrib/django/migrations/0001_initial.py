"""The table, in SQL since Django has no `generated always`. One that `cdc-outbox init-slot` made is taken over."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations, models
from django.db.models.functions import Now

CREATE = """
create table if not exists outbox (
    id bigint generated always as identity primary key,
    task text not null,
    args jsonb not null default '{}',
    key text,
    headers jsonb check (jsonb_typeof(headers) = 'object'),
    created_at timestamptz not null default now()
)"""


class Migration(migrations.Migration):
    initial = True
    dependencies: ClassVar[list[tuple[str, str]]] = []
    operations: ClassVar = [
        migrations.SeparateDatabaseAndState(
            # Not dropped on the way back: its rows may not have been relayed yet.
            database_operations=[migrations.RunSQL(CREATE, migrations.RunSQL.noop)],
            state_operations=[
                migrations.CreateModel(
                    name="Outbox",
                    fields=[
                        ("id", models.BigAutoField(primary_key=True, serialize=False)),
                        ("task", models.TextField()),
                        ("args", models.JSONField(default=dict)),
                        ("key", models.TextField(null=True)),
                        ("headers", models.JSONField(null=True)),
                        ("created_at", models.DateTimeField(db_default=Now())),
                    ],
                    options={"db_table": "outbox", "verbose_name_plural": "outbox"},
                )
            ],
        )
    ]
