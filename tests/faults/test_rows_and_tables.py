"""Rows and tables of every shape that applications bring: each committed row arrives, as it is."""

import json
from typing import Any

import pytest

from tests.fix_kafka import CreateTopic, Record
from tests.relay_rig import RelayRig, Row, rows_of, standard_check
from tests.slot_rig import SlotRig
from tests.waiting import eventually

# -- what a row holds ---------------------------------------------------------------------------------------------


def test_rows_that_are_deleted_where_they_are_inserted_arrive_all_the_same(rig: RelayRig) -> None:
    """C15 (zalando-nakadi/nakadi-producer-spring-boot-starter#174, debezium/debezium#2011): the WAL's row is what is
    sent; nobody looks for it in the table. By id, in a savepoint, in one statement, by truncate, by an update first."""
    rig.stream()
    ways = (
        "delete from outbox where id = (select max(id) from outbox)",
        "savepoint s; delete from outbox; release s",
        "truncate outbox",
        "update outbox set args = '{}'; delete from outbox",
        "with gone as (delete from outbox returning id) select from gone",
    )
    rows: list[Row] = []
    with rig.database.connect(autocommit=False) as writer:
        for place in range(100):
            rows += rig.stage(on=writer)
            writer.execute(ways[place % len(ways)].encode())
            writer.commit()
    records = rig.wait_for(rows)
    assert rows_of(records) == rows
    assert rig.backlog == 0
    assert all(json.loads(record.value or b"").keys() == {"n"} for record in records)


NOTHINGS: list[tuple[str, bytes | None]] = [
    ("null", None),  # SQL NULL: documented as a null value
    ("'null'", b"null"),
    ("'\"\"'", b'""'),
    ("'{}'", b"{}"),
    ("'[]'", b"[]"),
    ("'0'", b"0"),
    ("'false'", b"false"),
]


def nothings(rig: SlotRig) -> list[Record]:
    values = ", ".join(f"('t', {args})" for args, _ in NOTHINGS)
    rig.alter("alter table outbox alter args drop not null")
    rig.database.execute(f"insert into outbox (task, args) values {values}")
    rig.catch_up()
    return rig.read()


@pytest.mark.parametrize("policy", ["delete", pytest.param("compact", marks=pytest.mark.kafka_only)])
def test_each_kind_of_nothing_stays_what_it_is(ready: SlotRig, topic: CreateTopic, policy: str) -> None:
    """C16 (debezium/debezium#7581 and #4761): SQL NULL, JSON null, an empty string, object, array, zero."""
    ready.topic = topic(config={"cleanup.policy": policy})
    assert [record.value for record in nothings(ready)] == [value for _, value in NOTHINGS]


def test_an_empty_and_a_missing_task_are_sent_as_they_are(ready: SlotRig) -> None:
    """C16: a key that is empty, one that is null, never the text "None"; and a text column as args."""
    ready.alter(
        "alter table outbox alter task drop not null",
        "alter table outbox alter args type text",
        "insert into outbox (task, args) values ('', ''), (null, 'None'), ('null', 'null')",
    )
    ready.catch_up()
    found = [(record.key, record.headers["task"], record.value) for record in ready.read()]
    assert found == [(b"", b"", b""), (None, None, b"None"), (b"null", b"null", b"null")]


@pytest.mark.kafka_only
def test_a_row_without_a_key_for_a_compacted_topic_is_named(ready: SlotRig, topic: CreateTopic) -> None:
    """C16: Kafka never takes it there, and says so of its whole batch."""
    ready.topic = topic(config={"cleanup.policy": "compact"})
    ready.alter("alter table outbox alter task drop not null")
    rows = ready.stage(count=3)
    ready.alter("insert into outbox (task, args) values (null, '{{\"n\": -1}}')")
    rows += ready.stage(count=3)
    halted = ready.refused("stream", 5, "row id=4", "dead-letter")
    assert "Traceback" not in halted
    ready.catch_up("--on-poison", "dead-letter")
    assert set(rows_of(ready.read())) == set(rows)


NUMBERS = (
    "9007199254740993",
    "1.10",
    "1e400",
    "-0",
    f"{'1234567890' * 6}.{'0987654321' * 6}",
    "7" * 1000,
    "-1.000000000000000000000000000000000000000000000000000000001e-300",
)


@pytest.mark.parametrize("kind", ["jsonb", "json", "text"])
def test_numbers_arrive_byte_for_byte_as_postgres_prints_them(ready: SlotRig, kind: str) -> None:
    """C17 (dolthub/doltgresql#2686, dimitri/pgcopydb#552): nothing reads a number on the way."""
    ready.alter("alter table outbox alter args drop default", f"alter table outbox alter args type {kind}")
    args = "{" + ", ".join(f'"{place}": {number}' for place, number in enumerate(NUMBERS)) + "}"
    ready.database.execute(f"insert into outbox (task, args) values ('t', %s::{kind})", (args,))
    printed = ready.database.fetch_value("select args::text from outbox")
    ready.catch_up()
    (record,) = ready.read()
    assert record.value == printed.encode()


# -- the table's columns --------------------------------------------------------------------------------------------


def test_types_of_the_applications_own_are_used_by_name(ready: SlotRig) -> None:
    """C21 (sequinstream/sequin#625, lukashes/outboxx#89): a Type message stands before the Relation, and the columns'
    type oids are nobody's that we know: enum, domains, a domain over a domain, composite, array of enum."""
    ready.alter(
        "create type kind as enum ('mail', 'größe')",
        "create domain task_name as text check (value <> '')",
        "create domain payload as jsonb",
        "create domain inner_payload as payload",
        "create type point2 as (x int, y int)",
    )
    ready.stream()
    rows = ready.stage(count=2)
    ready.alter(
        "alter table outbox alter task type task_name, add kinds kind[] default '{{mail}}'",
        "alter table outbox add at point2 default (1, 2)",
        "alter table outbox alter args drop default, alter args type inner_payload, add priority kind default 'größe'",
    )
    rows += ready.stage(count=2)
    ready.alter("alter table outbox alter task type kind using task::text::kind")
    ready.alter(
        "insert into outbox (task, args) select 'mail', jsonb_build_object('n', n) from generate_series(4, 6) n"
    )
    rows += ready.next_rows("mail", 3)
    assert rows_of(ready.wait_for(rows)) == rows


def test_a_domain_over_bytea_is_sent_as_its_bytes(ready: SlotRig) -> None:
    """C21, the kind of it: what a column is does not depend on the name of its type."""
    ready.alter(
        "create domain raw as bytea",
        "create domain rawer as raw check (length(value) < 100)",
        "alter table outbox alter args drop default, alter args type rawer using '\\x00ff'",
        "insert into outbox (task, args) values ('t', '\\x00ff0a')",
    )
    ready.catch_up()
    (record,) = ready.read()
    assert record.value == b"\x00\xff\x0a"


def test_columns_may_come_go_and_move_while_rows_are_written(ready: SlotRig) -> None:
    """C23 (ClickHouse/ClickHouse#107427, confluentinc/bottledwater-pg#97, 2ndQuadrant/pglogical#173): each change
    brings a new Relation, inside the transaction too; columns are found by name in it."""
    ready.stream()
    rows: list[Row] = []
    with ready.database.connect(autocommit=False) as writer:
        for change in (
            "alter table outbox add column a_first text default 'x'",
            "alter table outbox add column zz_last int[] default '{1}'",
            "alter table outbox drop column a_first",
            # args moves behind all others
            "alter table outbox add moved jsonb; update outbox set moved = args;"
            " alter table outbox drop args; alter table outbox rename moved to args",
            "alter table outbox drop column key, drop column headers",
            "alter table outbox add column headers jsonb, add column key text",
        ):
            rows += ready.stage(count=2, on=writer)
            writer.execute(change.encode())
            rows += ready.stage(count=2, on=writer)
            writer.commit()
            rows += ready.stage()
    assert rows_of(ready.wait_for(rows)) == rows


@pytest.mark.parametrize("column", ["args", "task", "id"])
def test_a_column_that_is_missing_stops_the_relay_where_it_is(ready: SlotRig, column: str) -> None:
    """C23: the line names the column; nothing is confirmed past the first such row; the map brings it back."""
    relay = ready.stream()
    rows = ready.stage(count=2)
    ready.wait_for(rows)
    ready.alter(f"alter table outbox rename {column} to elsewhere")
    position = ready.wal_position
    names = {name: "elsewhere" if name == column else name for name in ("task", "args")}
    late = ready.next_rows("mail", 1)
    value = json.dumps({"n": late[0][1]})
    ready.database.execute(f"insert into outbox ({names['task']}, {names['args']}) values ('mail', %s)", (value,))
    assert relay.wait() == 3
    last = relay.stderr_text().splitlines()[-1]
    assert f"has no column {column}" in last
    assert "--column" in last
    assert ready.confirmed <= position
    ready.catch_up("--column", f"{column}=elsewhere")
    assert rows_of(ready.read()) == rows + late


# -- other tables, other changes ------------------------------------------------------------------------------------


def test_only_the_table_that_was_named_is_relayed(ready: SlotRig) -> None:
    """C25 (lukashes/outboxx#77 and #106, PostHog/posthog#64660): its namesake in another schema, and a wide table, are
    in the same publication; a search_path that changes later changes nothing."""
    relay = ready.stream()
    relay.wait_for_log('streaming "public"."outbox" through')
    wide = ", ".join(f"c{n} text default 'wide'" for n in range(300))
    ready.alter(
        "create schema app",
        "create table app.outbox (like public.outbox including all)",
        f"create table wide ({wide})",
    )
    rows = ready.stage(count=2)
    ready.wait_for(rows)
    assert relay.terminate() == 0
    ready.alter("alter publication {publication} add table app.outbox, wide")
    ready.init()
    relay = ready.stream()
    ready.alter(
        f'alter database "{ready.database.name}" set search_path = app, public',
        "insert into wide default values",
        "insert into app.outbox (task, args) values ('theirs', '{{\"n\": 0}}')",
    )
    more = ready.next_rows("mail", 1)
    ready.alter(
        "insert into public.outbox (task, args) values ('mail', '{{\"n\": 2}}')", "insert into wide default values"
    )
    assert rows_of(ready.wait_for(more))[-1:] == more
    assert relay.terminate() == 0
    ready.table = "public.outbox"
    relay = ready.stream()
    relay.wait_for_log('streaming "public"."outbox" through')
    assert {task for task, _ in rows_of(ready.read())} == {"mail"}


@pytest.mark.parametrize("how", ["truncate outbox", "truncate outbox, other restart identity cascade"])
def test_a_truncate_takes_no_row_that_was_committed_before(ready: SlotRig, how: str) -> None:
    """C27 (ihippik/wal-listener#57, supabase/etl#99, Trendyol/go-pq-cdc#117): a publication of the operator's own
    publishes it; the position moves on past it."""
    ready.alter(
        "create table other (id bigint references outbox)",
        "alter publication {publication} add table other",
        "alter publication {publication} set (publish = 'insert, update, delete, truncate')",
    )
    if "other" not in how:
        ready.alter("alter table other drop constraint other_id_fkey")
    ready.init("--dry-run")
    relay = ready.start("--on-gap", "recover")  # init-slot narrows the publication again
    relay.wait_for_log("streaming ")
    rows = ready.stage(count=3)
    ready.alter(how)
    rows += ready.stage(count=3)
    records = ready.wait_for(rows)
    assert set(rows_of(records)) == set(rows)
    position = ready.wal_position
    eventually(lambda: ready.stage("more") and ready.confirmed >= position, 20, "the position moves on")


# -- the table's privileges and keys --------------------------------------------------------------------------------


def test_a_table_without_a_key_is_purged_and_nobodys_deletes_are_broken(fresh: SlotRig) -> None:
    """C52 (cowprotocol/services#3461, timgit/pg-boss#387): our publication publishes inserts of one table only."""
    fresh.alter(
        "create table outbox (id bigint generated always as identity, task text not null, args jsonb not null)",
        "create table keyless (i int)",
        "insert into keyless values (1), (2)",
    )
    fresh.init()
    fresh.alter("delete from keyless where i = 1", "update keyless set i = 3")
    relay = fresh.stream("--purge-every", "100ms")
    rows = fresh.stage(count=5)
    assert rows_of(fresh.wait_for(rows)) == rows
    eventually(lambda: fresh.backlog == 0, 20, "all rows are purged")
    assert relay.terminate() == 0


def test_a_delete_that_another_publication_forbids_is_told_once_and_breaks_nothing_else(fresh: SlotRig) -> None:
    """C52 (politics-rewired/Spoke#1009, supabase/etl#22): FOR ALL TABLES, and no replica identity. It is no gap, though
    the server's code, 55000, is that of a lost slot too: the stream goes on, the purge says what mends it, and comes
    back."""
    fresh.alter("create table outbox (id bigint generated always as identity, task text not null, args jsonb not null)")
    fresh.init()
    fresh.alter(f'create publication "all_{fresh.publication}" for all tables')
    relay = fresh.stream("--purge-every", "100ms", "--on-gap", "recover")
    rows = fresh.stage(count=5)
    relay.wait_for_log("replica identity")
    rows += fresh.stage(count=5)
    assert rows_of(fresh.wait_for(rows)) == rows
    fresh.refused("purge", 3, "replica identity", "REPLICA IDENTITY")
    assert relay.stderr_text().count("replica identity") == 1
    assert "recovering" not in relay.stderr_text()
    fresh.alter("alter table outbox replica identity full")
    eventually(lambda: fresh.backlog == 0, 60, "all rows are purged")
    assert relay.terminate() == 0


def test_the_order_is_that_of_commits_whatever_the_ids_are(rig: RelayRig) -> None:
    """C13 (kamu-data/kamu-cli#1398, eugene-khyst/postgresql-event-sourcing#2): a low id commits late, after a restart
    of the relay and a purge of what is above it."""
    relay = rig.stream("--purge-every", "100ms")
    late: Any = rig.database.connect(autocommit=False)
    first = rig.stage("late", on=late)
    others = rig.stage(count=499)
    rig.wait_for(others)
    eventually(lambda: rig.backlog == 0, 20, "the others are purged")
    assert relay.terminate() == 0
    relay = rig.stream("--purge-every", "100ms")
    late.commit()
    records = rig.wait_for(first)
    assert rows_of(records) == others + first
    assert standard_check(others + first, [], records) == 0
    eventually(lambda: rig.backlog == 0, 20, "the late one is purged")
    assert relay.terminate() == 0
