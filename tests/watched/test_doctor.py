"""`doctor`: each precondition broken for real is a line that says what mends it; mended, the line is well."""

from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # not in its __all__
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

from cdc_outbox import checks_server
from cdc_outbox.config import Settings
from cdc_outbox.facts import Facts
from tests.fix_postgres import StartPostgres
from tests.slot_rig import NewRig, SlotRig
from tests.watched.rig import doctor, set_up, status, status_text

# What is done to the publication; the line that tells of it, with its verdict and some of its words.
PUBLICATIONS = {
    "missing": ("drop publication {publication}", "publication", "fail", "does not exist"),
    "without the table": ("alter publication {publication} drop table outbox", "publication", "fail", "not publish"),
    "with deletes": (
        "alter publication {publication} set (publish = 'insert, delete')",
        "published operations",
        "warn",
        "insert, delete: the purge's deletes",
    ),
    "without inserts": (
        "alter publication {publication} set (publish = 'update')",
        "published operations",
        "fail",
        "inserts are not published, only update",
    ),
    "with a row filter": (
        "alter publication {publication} set table outbox where (task <> 'mail')",
        "row filter",
        "fail",
        "task <> 'mail'",
    ),
    "with a column list": (
        "alter publication {publication} set table outbox (id, task)",
        "column list",
        "fail",
        "only id, task are published",
    ),
    "younger than the slot": (
        "do $$ begin drop publication {publication};"
        " create publication {publication} for table outbox with (publish = 'insert'); end $$",
        "publication before slot",
        "fail",
        "younger than the slot",
    ),
}


@pytest.mark.parametrize("kind", PUBLICATIONS)
def test_a_publication_that_does_not_carry_the_whole_table(ready: SlotRig, kind: str) -> None:
    change, line, verdict, words = PUBLICATIONS[kind]
    ready.alter(change)
    report = doctor(ready)
    report.expect(line, verdict, words, "init-slot")
    report.expect("checkpoint guard", "fail", "init-slot")
    # Any change makes it younger than the slot's position, as far as the catalogue tells.
    assert report.verdicts("fail") <= {line, "checkpoint guard", "publication before slot"}
    set_up(ready)
    assert not doctor(ready).failed


def test_a_publication_for_all_tables(ready: SlotRig) -> None:
    ready.alter("drop publication {publication}", "create publication {publication} for all tables")
    doctor(ready).expect("publication", "warn", "publishes all tables", "--publication")


def test_a_slot_made_by_hand_before_its_publication(fresh: SlotRig) -> None:
    fresh.alter("create table outbox (id bigint generated always as identity primary key, task text, args jsonb)")
    fresh.create_slot()
    fresh.alter("create publication {publication} for table outbox with (publish = 'insert')")
    report = doctor(fresh)
    report.expect("publication before slot", "fail", "younger than the slot", "init-slot")
    assert {"checkpoint guard", "privileges"} < report.verdicts("fail")
    assert status(fresh).slot.state == "inactive"
    set_up(fresh)
    assert not doctor(fresh).failed


def test_a_slot_that_someone_else_moved(ready: SlotRig) -> None:
    ready.stage()
    ready.alter(f"select pg_replication_slot_advance('{ready.slot}', pg_current_wal_lsn())")
    report = doctor(ready)
    assert report.verdicts("fail") == {"checkpoint guard"}
    report.expect("checkpoint guard", "fail", "re-created or advanced by someone else", "init-slot")


def test_a_table_that_was_dropped_and_made_again(ready: SlotRig) -> None:
    ready.alter("alter table outbox rename to old", "create table outbox (like old including all)")
    report = doctor(ready)
    report.expect("publication", "fail", 'does not publish "public"."outbox"', "init-slot")
    report.expect("checkpoint guard", "fail", "dropped and re-created", "init-slot")


SLOTS = {
    "physical": ("select pg_create_physical_replication_slot('{slot}')", "slot_type = physical"),
    "two_phase": (
        "select pg_create_logical_replication_slot('{slot}', 'pgoutput', twophase => true)",
        "two_phase = True",
    ),
}


@pytest.mark.parametrize("kind", SLOTS)
def test_a_slot_of_another_kind(ready: SlotRig, kind: str) -> None:
    create, word = SLOTS[kind]
    ready.drop_slot()
    ready.alter(create.format(slot=ready.slot))
    try:
        report = doctor(ready)
        report.expect("slot", "fail", "not one this relay can read", word, "--slot")
        found = status(ready)
        assert found.slot.state == "foreign"
        assert word in found.slot.problem
        assert "choose another name with --slot" in status_text(ready)
    finally:
        ready.drop_slot()


def test_a_slot_of_another_database(ready: SlotRig, new_rig: NewRig) -> None:
    other = new_rig(ready.database.server)
    other.slot = ready.slot
    doctor(other).expect("slot", "fail", f"database = {ready.database.name}", "--slot")
    assert status(other).slot.state == "foreign"


def test_a_table_of_another_layout(fresh: SlotRig) -> None:
    fresh.alter("create table outbox (id uuid primary key, kind varchar(100), payload inet, meta int)")
    set_up(fresh)
    doctor(fresh).expect("columns", "fail", "has no column task, args", "--column ROLE=NAME")
    columns = {"task": "kind", "args": "payload"}
    doctor(fresh, columns=columns).expect("columns", "warn", "payload inet", "payload is sent as the text of its type")
    report = doctor(fresh, columns={**columns, "headers": "meta"})
    report.expect("columns", "fail", "meta must hold a JSON object", "--column headers=NAME")
    assert "how long rows wait" in status(fresh).unseen[0]


def test_a_partitioned_table_published_under_its_partitions_names(fresh: SlotRig) -> None:
    fresh.alter(
        "create table outbox (id bigint generated always as identity primary key, task text not null, args jsonb,"
        " created_at timestamptz default now()) partition by range (id)",
        "create table outbox_1 partition of outbox for values from (1) to (3)",
        "create table outbox_2 partition of outbox for values from (3) to (9)",
    )
    set_up(fresh)
    fresh.stage(count=4)
    found = status(fresh)
    assert found.outbox.rows >= 1
    assert found.lag.seconds > 0
    doctor(fresh).expect("partitions", "ok")
    fresh.alter("alter publication {publication} set (publish_via_partition_root = false)")
    doctor(fresh).expect("partitions", "fail", "their partitions' names", "init-slot")


def test_a_slot_that_standbys_keep(fresh: SlotRig, postgres_major: int) -> None:
    if postgres_major < 17:
        pytest.skip("failover slots are of PostgreSQL 17")
    set_up(fresh, failover=True)
    assert status(fresh).slot.failover is True
    doctor(fresh).expect("failover", "warn", "ahead of them", "alter system set synchronized_standby_slots")


def test_limits_of_the_server_that_will_hurt(
    postgres_server: StartPostgres, new_rig: NewRig, postgres_major: int
) -> None:
    server = postgres_server(max_slot_wal_keep_size="64MB", wal_sender_timeout="1s")
    rig = new_rig(server)
    set_up(rig)
    report = doctor(rig)
    report.expect("max_slot_wal_keep_size", "warn", "64 MB", "alter system set max_slot_wal_keep_size")
    report.expect("wal_sender_timeout", "warn", "1000 ms", "alter system set wal_sender_timeout")
    assert not report.failed


@pytest.mark.kafka_only
def test_a_topic_that_is_missing_or_compacted_or_too_narrow(ready: SlotRig) -> None:
    ready.stage(padding=30_000)
    missing = doctor(ready, kafka=True, topic="no.such.topic")
    missing.expect("topic", "fail", "does not exist", "kafka-topics.sh", "--create --topic no.such.topic")
    assert missing.verdicts("fail") == {"topic"}
    assert "no.such.topic" not in ready.broker.admin.list_topics(timeout=5).topics
    narrow = ready.broker.create_topic(config={"max.message.bytes": "20000", "cleanup.policy": "compact"})
    report = doctor(ready, kafka=True, topic=narrow)
    assert report.verdicts("fail") == {"largest row"}
    report.expect("largest row", "fail", "29.3 kB, of 1 rows", "20,000 in the topic", "max.message.bytes")
    report.expect("topic's clean-up", "warn", "compact", "cleanup.policy=delete")
    report.expect("permission to write", "ok", "granted")
    here = doctor(ready, kafka=True, properties={"message.max.bytes": "25000"})
    here.expect("largest row", "fail", "25,000 bytes here")
    template = doctor(ready, kafka=True, topic="jobs.{task}")
    template.expect("topic", "skip", "depend on the rows")
    assert not template.failed
    ready.broker.delete_topic(narrow)


@pytest.mark.kafka_only
def test_a_topic_that_this_client_may_not_write_to(ready: SlotRig) -> None:
    def rule(operation: AclOperation) -> AclBinding:
        return AclBinding(
            ResourceType.TOPIC,
            ready.topic,
            ResourcePatternType.LITERAL,
            "User:ANONYMOUS",
            "*",
            operation,
            AclPermissionType.ALLOW,
        )

    admin = ready.broker.admin
    read_only = rule(AclOperation.DESCRIBE)
    admin.create_acls([read_only])[read_only].result(10)
    try:
        report = doctor(ready, kafka=True)
        report.expect("permission to write", "fail", "not authorised to write", "grant this client Write")
    finally:
        every = AclBindingFilter(
            ResourceType.TOPIC,
            ready.topic,
            ResourcePatternType.LITERAL,
            None,  # type: ignore[arg-type]  # any principal
            None,  # type: ignore[arg-type]  # any host
            AclOperation.ANY,
            AclPermissionType.ANY,
        )
        admin.delete_acls([every])[every].result(10)
    doctor(ready, kafka=True).expect("permission to write", "ok")


def test_kafka_is_not_there(ready: SlotRig) -> None:
    report = doctor(ready, kafka=True, bootstrap_servers="127.0.0.1:1")
    assert report.verdicts("fail") == {"Kafka"}
    report.expect("Kafka", "fail", "no broker answers at 127.0.0.1:1", "refused", "--bootstrap-servers")
    report.expect("permission to write", "skip", "no broker answers")


def test_a_property_that_librdkafka_does_not_take(ready: SlotRig) -> None:
    report = doctor(ready, kafka=True, properties={"compression.codec": "best"})
    assert report.verdicts("fail") == {"producer settings"}
    report.expect("producer settings", "fail", "compression.codec", "best")


class Told(Facts):
    """A server that says what the test wants: for the version that no test has."""

    def __init__(self, version: int, **parameters: str) -> None:
        self.settings = Settings()
        self.parameters = {"server_version_num": str(version), **parameters}


@pytest.mark.parametrize(
    ("version", "level", "effective", "verdict"),
    [
        (180006, "logical", None, "ok"),
        (180006, "replica", None, "fail"),
        (190000, "replica", "replica", "ok"),
        (190000, "replica", "logical", "ok"),
        (190000, "logical", "logical", "ok"),
        (190000, "minimal", "minimal", "fail"),
    ],
)
def test_from_19_on_the_first_logical_slot_raises_the_level_in_effect(
    version: int, level: str, effective: str | None, verdict: str
) -> None:
    more = {} if effective is None else {"effective_wal_level": effective}
    assert checks_server.wal_level(Told(version, wal_level=level, **more)).verdict == verdict


@pytest.mark.parametrize(
    ("names", "verdict"),
    [
        ("", "ok"),
        ("*", "fail"),
        ("FIRST 1 (*)", "fail"),
        ("ANY 2 (s1, CDC-outbox)", "fail"),
        ('"cdc-outbox"', "fail"),
        ("s1, s2", "ok"),
        ("cdc-outbox-standby, first", "ok"),
    ],
)
def test_a_list_of_standbys_that_counts_the_relay(names: str, verdict: str) -> None:
    told = Told(180000, synchronous_standby_names=names, application_name="cdc-outbox")
    assert checks_server.synchronous_standby_names(told).verdict == verdict


def slot(**columns: Any) -> dict[str, Any]:
    return {"slot_name": "cdc_outbox", "failover": False, **columns}


@pytest.mark.parametrize(
    ("slots", "senders", "listed", "verdict"),
    [
        ([], [], "", "skip"),
        ([slot()], [{"logical": True}], "", "ok"),
        ([slot()], [{"logical": True}, {"logical": None}], "", "warn"),
        ([slot(failover=True)], [{"logical": None}], "", "warn"),
        ([slot(failover=True)], [{"logical": None}], "standby", "ok"),
    ],
)
def test_a_slot_that_does_not_outlive_the_primary(
    slots: list[dict[str, Any]], senders: list[dict[str, Any]], listed: str, verdict: str
) -> None:
    told = Told(170000, synchronized_standby_slots=listed)
    told.slots, told.senders = slots, senders
    found = checks_server.failover(told)
    assert found.verdict == verdict
    assert checks_server.failover(Told(160000)).verdict == "skip"
