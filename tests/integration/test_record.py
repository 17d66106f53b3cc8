"""What Kafka stores for a row: key, value, headers, timestamp."""

import json
import re
from datetime import UTC, datetime

import pytest
from confluent_kafka import KafkaException

from tests.fix_command import Command
from tests.fix_kafka import Broker, CreateTopic, Record
from tests.fix_postgres import Database
from tests.relay_rig import RelayRig, commit_lsn

ARGS = (
    "{}",
    "[]",
    "null",
    '""',
    "0",
    "true",
    '{"price": 1.10, "zero": -0, "tiny": 1e-7, "big": 9007199254740993}',
    '{"huge": 1e400}',
    f'{{"digits": {"1234567890" * 6}.{"0987654321" * 6}}}',
    f'{{"thousand": {"7" * 1000}}}',
    '{"b": 1, "a": 2, "a": 3}',
    '{"text": "größer ≠ 大 🐘 \\" \\\\ \\n / é"}',
    '  { "spaces" : [ 1 ,  2 ] }  ',
)


def test_the_value_is_args_as_postgres_prints_them(rig: RelayRig) -> None:
    for args in ARGS:
        rig.database.execute("insert into outbox (task, args) values ('t', %s::jsonb)", (args,))
    printed = rig.database.fetch("select id::text, args::text from outbox order by outbox.id")
    rig.catch_up()
    records = rig.read()
    assert [(record.headers["id"], record.value) for record in records] == [
        (row_id.encode(), args.encode()) for row_id, args in printed
    ]
    assert b'"price": 1.10' in (records[6].value or b"")


def test_a_record_carries_its_row_and_commit(rig: RelayRig) -> None:
    before = rig.wal_position
    moment = datetime.now(UTC)
    row_id = rig.database.fetch_value(
        "insert into outbox (task, args, headers) values ('send mail', '{\"to\": 7}',"
        ' \'{"traceparent": "00-ab-cd-01", "empty": "", "größe": "ü", "nothing": null}\') returning id'
    )
    after = rig.wal_position
    rig.catch_up()
    (record,) = rig.read()
    assert record.key == b"send mail"
    assert record.value == b'{"to": 7}'
    assert before <= commit_lsn(record) < after
    assert record.headers.keys() == {"id", "task", "commit_lsn", "traceparent", "empty", "größe", "nothing"}
    assert record.headers["id"] == str(row_id).encode()
    assert record.headers["task"] == b"send mail"
    assert record.headers["traceparent"] == b"00-ab-cd-01"
    assert record.headers["empty"] == b""
    assert record.headers["größe"] == "ü".encode()
    assert record.headers["nothing"] is None
    committed = record.timestamp / 1000
    assert moment.timestamp() - 0.001 <= committed <= datetime.now(UTC).timestamp()


def test_rows_of_one_transaction_share_commit_position_and_time(rig: RelayRig) -> None:
    rig.database.execute("insert into outbox (task) select 't' || i from generate_series(1, 50) i")
    rig.database.execute("insert into outbox (task) values ('later')")
    rig.catch_up()
    *together, later = rig.read()
    assert len({(commit_lsn(record), record.timestamp) for record in together}) == 1
    assert commit_lsn(later) > commit_lsn(together[0])
    assert later.timestamp >= together[0].timestamp


def test_the_key_column_overrides_the_task_as_key(rig: RelayRig) -> None:
    rig.database.execute(
        "insert into outbox (task, key) values ('t', 'customer 7'), ('t', null), ('t', ''), ('', null)"
    )
    rig.catch_up()
    assert [record.key for record in rig.read()] == [b"customer 7", b"t", b"", b""]


def test_equal_keys_meet_on_the_partition_where_java_clients_put_them(rig: RelayRig, topic: CreateTopic) -> None:
    rig.topic = topic(partitions=7)
    keys = [f"customer {number}" for number in range(40)]
    for _ in range(2):
        rig.database.execute("insert into outbox (task, key) select 't', k from unnest(%s::text[]) k", (keys,))
    rig.catch_up()
    records = rig.read()
    assert len(records) == 80
    assert all(record.partition == java_partition(record.key or b"", 7) for record in records)


def java_partition(key: bytes, partitions: int) -> int:
    """Kafka's own `Utils.toPositive(Utils.murmur2(key)) % partitions`."""
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = (0x9747B28C ^ len(key)) & mask
    whole = len(key) - len(key) % 4
    for start in range(0, whole, 4):
        k = int.from_bytes(key[start : start + 4], "little") * m & mask
        h = (h * m & mask) ^ ((k ^ k >> 24) * m & mask)
    if rest := key[whole:]:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return ((h ^ h >> 15) & 0x7FFFFFFF) % partitions


def test_a_topic_template_is_filled_from_the_row(rig: RelayRig, broker: Broker) -> None:
    names = [f"jobs.{rig.slot}.{task}" for task in ("mail", "report")]
    for name in names:
        broker.create_topic(name)
    try:
        rig.stage("mail", 2)
        rig.stage("report", 1)
        rig.catch_up("--topic", f"jobs.{rig.slot}.{{task}}")
        assert [len(broker.read(name)) for name in names] == [2, 1]
    finally:
        for name in names:
            broker.delete_topic(name)


def test_cloudevents_headers_follow_the_kafka_binding(rig: RelayRig) -> None:
    rig.database.execute(
        "insert into outbox (task, args, key, headers)"
        " values ('shop.order', '{\"n\": 1.10}', 'c7', '{\"traceparent\": \"00-ab\"}')"
    )
    rig.catch_up("--format", "cloudevents", "--source", "/shop")
    (record,) = rig.read()
    headers = {name: (value or b"").decode() for name, value in record.headers.items()}
    moment = headers.pop("ce_time")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", moment)
    assert abs(datetime.fromisoformat(moment).timestamp() - record.timestamp / 1000) < 0.001
    assert re.fullmatch(r"[0-9A-F]+/[0-9A-F]+", headers.pop("ce_commitlsn"))
    assert headers == {
        "ce_specversion": "1.0",
        "ce_id": "1",
        "ce_source": "/shop",
        "ce_type": "shop.order",
        "ce_partitionkey": "c7",
        "content-type": "application/json",
        "traceparent": "00-ab",
    }
    assert record.key == b"c7"
    assert record.value == b'{"n": 1.10}'


DEBEZIUM = """
create table events (
    id uuid primary key default gen_random_uuid(),
    aggregatetype text not null,
    aggregateid text not null,
    type text not null,
    payload {payload},
    note text default 'never looked at'
)"""
MAPPED = ("--table", "events", "--column", "task=type", "--column", "args=payload", "--column", "key=aggregateid")


def mapped_records(database: Database, broker: Broker, command: Command, topic: str, values: str) -> list[Record]:
    """What arrives of `values` (aggregatetype, aggregateid, type, payload)."""
    rig = RelayRig(database, broker, command, topic)
    rig.init("--table", "events")
    database.execute(f"insert into events (aggregatetype, aggregateid, type, payload) values {values}")
    rig.catch_up(*MAPPED)
    return rig.read()


def test_a_table_of_another_layout_serves_through_a_column_map(
    database: Database, broker: Broker, command: Command, topic: CreateTopic
) -> None:
    database.execute(DEBEZIUM.format(payload="jsonb"))
    values = "('order', 'o-1', 'OrderCreated', '{\"total\": 1.10}'), ('order', 'o-2', 'OrderDeleted', null)"
    created, deleted = mapped_records(database, broker, command, topic(), values)
    ids = dict(database.fetch("select type, id::text from events"))
    assert (created.key, created.value) == (b"o-1", b'{"total": 1.10}')
    assert (deleted.key, deleted.value) == (b"o-2", None)  # SQL NULL is a null value
    assert created.headers["task"] == b"OrderCreated"
    assert created.headers["id"] == ids["OrderCreated"].encode()
    assert created.headers.keys() == {"id", "task", "commit_lsn"}


def test_a_bytea_column_is_sent_as_its_bytes(
    database: Database, broker: Broker, command: Command, topic: CreateTopic
) -> None:
    database.execute(DEBEZIUM.format(payload="bytea"))
    payload = bytes(range(256))
    values = f"('a', 'k', 't', '\\x{payload.hex()}'), ('a', 'k', 't', ''), ('a', 'k', 't', null)"
    records = mapped_records(database, broker, command, topic(), values)
    assert [record.value for record in records] == [payload, b"", None]


def test_a_latin1_database_sends_utf8(database: Database, broker: Broker, command: Command, topic: CreateTopic) -> None:
    name = f"{database.name}_latin1"
    database.execute(f"create database {name} template template0 encoding latin1 locale 'C'")
    latin1 = Database(database.server, name)
    try:
        rig = RelayRig(latin1, broker, command, topic())
        rig.init()
        latin1.execute("insert into outbox (task, args) values (%s, %s::jsonb)", ("größe", '{"é": "ÿ"}'))
        rig.catch_up()
        (record,) = rig.read()
        assert record.key == "größe".encode()
        assert json.loads(record.value or b"") == {"é": "ÿ"}
    finally:
        latin1.drop()


def test_columns_that_nobody_asked_for_may_come_and_go(rig: RelayRig) -> None:
    before = rig.stage(count=2)
    with rig.database.connect(autocommit=False) as writer:
        inside = rig.stage(on=writer)
        writer.execute("alter table outbox add column tenant text")
        inside += rig.stage(on=writer)
    rig.database.execute("alter table outbox drop column key, drop column headers, drop column created_at")
    after = rig.stage(count=2)
    rig.catch_up()
    assert [record.headers["task"] for record in rig.read()] == [b"mail"] * 6
    assert len(before + inside + after) == 6


@pytest.mark.kafka_only  # tansu makes any topic that is asked for
def test_a_missing_topic_is_said_at_the_start(rig: RelayRig, broker: Broker) -> None:
    rig.stage()
    done = rig.command.run("stream", *rig.stream_options, "--topic", f"{rig.topic}.missing", "--until-caught-up")
    assert done.returncode == 3
    assert f"{rig.topic}.missing" in done.stderr
    with pytest.raises(KafkaException):
        broker.read(f"{rig.topic}.missing")
    rig.catch_up()
    assert len(rig.read()) == 1
