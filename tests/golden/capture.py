"""Captures golden bytes: what each PostgreSQL major really sends for one scripted workload.

Run by hand: `python -m tests.golden.capture [MAJOR …]`. It writes `pgMAJOR.txt` beside this file: one CopyData
message a line, a label of its type and its bytes in hexadecimal; `# name` begins a stream. `tests/unit` holds the
expected values for this workload, so a change here needs a change there.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
from psycopg import pq

from cdc_outbox.embedded import PostgresServer, postgres_bindir
from cdc_outbox.lsn import parse_lsn
from cdc_outbox.statements import statements
from cdc_outbox.walsender import KEEPALIVE, XLOG_DATA_HEADER_BYTES, decode_keepalive, encode_status_update

FOLDER = Path(__file__).parent
MAJORS = (15, 16, 17, 18)
LABELS = {
    "B": "Begin",
    "C": "Commit",
    "D": "Delete",
    "I": "Insert",
    "M": "Message",
    "O": "Origin",
    "R": "Relation",
    "T": "Truncate",
    "U": "Update",
    "Y": "Type",
}
NAMES = {
    "schema": "public",
    "outbox": "outbox",
    "checkpoint": "outbox_checkpoint",
    "dead_letter": "outbox_dead_letter",
    "archive": "outbox_archive",
    "archived_at": "outbox_archived_at",
}

SCHEMA = """
create type mood as enum ('calm', 'busy');
create domain positive as integer check (value > 0);
create type pair as (a integer, b text);
create table plain (id integer primary key, note text);
create table whole (id integer, note text);
alter table whole replica identity full;
create table typed (id integer primary key, m mood, p positive, c pair, ms mood[]);
create table toasted (id integer primary key, big text, n integer);
alter table toasted alter column big set storage external;
create table parted (id integer, task text) partition by range (id);
create table parted_low partition of parted for values from (0) to (100);
create table parted_high partition of parted for values from (100) to (200);
create schema "Größe ""q"" ü";
create table "Größe ""q"" ü"."Job %s" ("Na me" text, "ключ" integer);
create publication golden for all tables
    with (publish = 'insert, update, delete, truncate', publish_via_partition_root = true);
select pg_replication_origin_create('golden_origin');
"""

WORKLOAD = """
insert into outbox (task) values ('default');

insert into outbox (id, task, args, key, headers, created_at) overriding system value
    values (1000, 'explicit', '{"price": 1.10}', 'k', '{"traceparent": "00-1"}', '2024-02-29 12:00:00+00');

insert into outbox (task, args, key) values ('many', '1', ''), ('many', '2', null), ('many', '3', 'x');

copy outbox (task, args) from stdin;

insert into outbox (task, args, key) values ('größe', '{"n": 123456789012345678901234567890, "s": "é✓𝄞"}', 'ключ');

begin;
insert into outbox (task) values ('kept 1');
savepoint a;
insert into outbox (task) values ('undone');
rollback to a;
insert into outbox (task) values ('kept 2');
savepoint b;
insert into outbox (task) values ('kept 3');
release b;
commit;

begin;
insert into outbox (task) values ('rolled back');
rollback;

insert into plain values (1, 'one'), (2, null);
update plain set note = 'uno' where id = 1;
update plain set id = 3 where id = 2;
delete from plain where id = 3;

insert into whole values (1, 'one');
update whole set note = null;
delete from whole;

begin;
update outbox set key = 'changed' where id = 1;
delete from outbox where id = 1;
commit;

insert into typed values (1, 'busy', 7, row(1, 'b'), '{calm,busy}');

begin;
insert into toasted values (1, repeat('x', 2100), 1);
update toasted set n = 2;
commit;

insert into parted values (1, 'low'), (101, 'high');

insert into "Größe ""q"" ü"."Job %s" values ('quoted', 5);

begin;
insert into outbox (task) values ('before');
alter table outbox add column extra integer default 3;
insert into outbox (task, extra) values ('after', 7);
commit;

alter table outbox drop column extra;

insert into outbox (task) values ('dropped');

truncate plain, whole restart identity cascade;

begin;
insert into outbox (task) values ('prepared');
prepare transaction 'yes';

begin;
insert into outbox (task) values ('never');
prepare transaction 'no';

insert into outbox (task) values ('between');

commit prepared 'yes';
rollback prepared 'no';

select pg_replication_origin_session_setup('golden_origin');
begin;
insert into outbox (task) values ('origin');
select pg_replication_origin_xact_setup('0/ABC', '2024-01-01 00:00:00+00');
commit;
select pg_replication_origin_session_reset();

select pg_logical_emit_message(false, 'golden', 'not asked for');

insert into outbox (task) values ('last');
"""
COPIED = 'copied\t{"row": 1}\ncopied\t{"row": 2}\ncopied\t{"row": 3}\n'

MESSAGES = """
begin;
select pg_logical_emit_message(true, 'golden', 'inside');
insert into outbox (task) values ('with a message');
commit;
select pg_logical_emit_message(false, 'golden', 'outside');
insert into outbox (task) values ('the end');
"""


def load(major: int) -> dict[str, list[bytes]]:
    """The messages of each stream, as captured."""
    streams: dict[str, list[bytes]] = {}
    for line in (FOLDER / f"pg{major}.txt").read_text().splitlines():
        name, _, text = line.partition(" ")
        if name == "#":
            messages = streams.setdefault(text, [])
        else:
            messages.append(bytes.fromhex(text))
    return streams


def label(message: bytes) -> str:
    if message[0] == KEEPALIVE:
        return "Keepalive"
    return LABELS[chr(message[XLOG_DATA_HEADER_BYTES])]


def execute(connection: psycopg.Connection[Any], script: str) -> None:
    """One statement at a time, so that each is a transaction of its own unless it says `begin`."""
    for statement in script.strip().split(";\n"):
        if "from stdin" in statement:
            with connection.cursor().copy(statement.encode()) as copy:
                copy.write(COPIED)
        elif statement.strip(" \n;"):
            connection.execute(statement.encode())


def stream(conninfo: str, slot: str, options: str, until: int) -> Iterator[bytes]:
    """Every message up to the server's position `until`."""
    pgconn = pq.PGconn.connect(conninfo.encode())
    try:
        command = (
            f"START_REPLICATION SLOT {slot} LOGICAL 0/0 (proto_version '1', publication_names '\"golden\"'{options})"
        )
        result = pgconn.exec_(command.encode())
        assert result.status == pq.ExecStatus.COPY_BOTH, result.error_message
        pgconn.put_copy_data(encode_status_update(1, 0, reply_requested=True))
        pgconn.flush()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            length, view = pgconn.get_copy_data(0)
            assert length > 0, pgconn.get_result()
            message = bytes(view)
            yield message
            if message[0] == KEEPALIVE:
                if decode_keepalive(message).wal_end >= until:
                    return
                pgconn.put_copy_data(encode_status_update(1, 0, reply_requested=True))
                pgconn.flush()
        raise TimeoutError("the stream did not reach its end")
    finally:
        pgconn.finish()


def capture(major: int) -> dict[str, list[bytes]]:
    with PostgresServer(postgres_bindir(major)) as server:
        server.start()
        create_slot = b"select pg_create_logical_replication_slot(%s, 'pgoutput')"
        replication = server.socket_dsn(replication="database", client_encoding="UTF8")
        streams = {}
        with psycopg.connect(server.socket_dsn(), autocommit=True) as connection:
            for statement in statements("tables.sql", NAMES):
                connection.execute(statement.encode())
            execute(connection, SCHEMA)
            for name, script, options in (("workload", WORKLOAD, ""), ("messages", MESSAGES, ", messages 'true'")):
                connection.execute(create_slot, [name])
                execute(connection, script)
                row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
                assert row is not None
                streams[name] = list(stream(replication, name, options, parse_lsn(row[0])))
        return streams


def main() -> None:
    for major in [int(argument) for argument in sys.argv[1:]] or MAJORS:
        lines = []
        for name, messages in capture(major).items():
            lines.append(f"# {name}")
            lines += [f"{label(message)} {message.hex()}" for message in messages]
        path = FOLDER / f"pg{major}.txt"
        path.write_text("\n".join(lines) + "\n")
        print(f"{path.name}: {len(lines)} lines, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
