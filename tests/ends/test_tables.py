"""The own_tables that frameworks make are those of `sql/`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy
from django.apps import apps
from django.core.management import call_command
from django.db import transaction

from cdc_outbox.contrib.sqlalchemy import inbox_table, outbox_table
from cdc_outbox.embedded import PostgresServer
from tests.ends.conftest import OpenClient
from tests.fix_postgres import Database

SHAPE = """
select array(select format('%%s %%s %%s %%s %%s', attname, format_type(atttypid, atttypmod), attnotnull, attidentity,
                           pg_get_expr(adbin, adrelid))
             from pg_attribute left join pg_attrdef on adrelid = attrelid and adnum = attnum
             where attrelid = to_regclass(%(table)s) and attnum > 0 order by attnum)
    || array(select conname || ' ' || pg_get_constraintdef(oid) from pg_constraint
             where conrelid = to_regclass(%(table)s) order by conname)
    || array(select regexp_replace(pg_get_indexdef(indexrelid), ' ON .* USING', '') from pg_index
             where indrelid = to_regclass(%(table)s) order by 1)"""


def shape(database: Database, table: str) -> list[str]:
    """Columns, constraints and indexes, in words."""
    found: list[str] = database.fetch_value(SHAPE, {"table": table})
    assert found
    return found


@pytest.mark.parametrize(("name", "factory"), [("outbox", outbox_table), ("inbox", inbox_table)])
def test_sqlalchemy_makes_the_same_table(
    name: str, factory: Callable[..., Any], own_tables: Database, open_client: OpenClient
) -> None:
    own_tables.execute("create schema app")
    metadata = sqlalchemy.MetaData()
    factory(metadata, schema="app")
    metadata.create_all(open_client("SQLAlchemy", own_tables, autocommit=True).connection)
    assert shape(own_tables, f"app.{name}") == shape(own_tables, name)


def test_a_row_of_sqlalchemys_table_is_a_job(own_tables: Database, open_client: OpenClient) -> None:
    outbox = outbox_table(sqlalchemy.MetaData())
    client = open_client("SQLAlchemy", own_tables)
    with client.transaction():
        client.connection.execute(outbox.insert().values(task="mail", args={"n": 1}, headers=None))
        client.connection.execute(outbox.insert().values(task="mail", headers={"a": "b"}))
    found = own_tables.fetch("select id, task, args, key, headers, created_at is null from outbox order by id")
    assert found == [(1, "mail", {"n": 1}, None, None, False), (2, "mail", {}, None, {"a": "b"}, False)]


def migrate(database: Database, open_client: OpenClient) -> Any:
    """The app's migrations, on a database that Django sees under its name; the model."""
    open_client("Django", database)
    call_command("migrate", "cdc_outbox", database=database.name, verbosity=0)
    return apps.get_model("cdc_outbox", "Outbox")


def test_django_makes_the_same_table(
    own_tables: Database,
    postgres: PostgresServer,
    new_database: Callable[[PostgresServer], Database],
    open_client: OpenClient,
) -> None:
    migrated = new_database(postgres)
    migrate(migrated, open_client)
    assert shape(migrated, "outbox") == shape(own_tables, "outbox")


def test_django_takes_over_a_table_that_is_there(own_tables: Database, open_client: OpenClient) -> None:
    before = shape(own_tables, "outbox")
    own_tables.execute("insert into outbox (task) values ('waiting')")
    outbox = migrate(own_tables, open_client)
    assert shape(own_tables, "outbox") == before
    assert [job.task for job in outbox.objects.using(own_tables.name)] == ["waiting"]
    call_command("migrate", "cdc_outbox", "zero", database=own_tables.name, verbosity=0)
    assert own_tables.fetch("select task from outbox") == [("waiting",)]


def test_a_row_of_djangos_model_is_a_job(own_tables: Database, open_client: OpenClient) -> None:
    outbox = migrate(own_tables, open_client)
    with transaction.atomic(using=own_tables.name):
        job = outbox.objects.using(own_tables.name).create(task="mail", args={"n": 1})
        assert own_tables.fetch("select 1 from outbox") == []
    assert str(job) == "mail 1"
    found = own_tables.fetch("select id, task, args, key, headers, created_at is null from outbox")
    assert found == [(1, "mail", {"n": 1}, None, None, False)]


def test_djangos_model_needs_no_migration_more(own_tables: Database, open_client: OpenClient) -> None:
    migrate(own_tables, open_client)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks at the database `default` too, which is none
        call_command("makemigrations", "cdc_outbox", check=True, dry_run=True, verbosity=0)
    call_command("check")
