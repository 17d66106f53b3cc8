"""Relayed rows in the archive, staged again from there; what becomes of rows that Kafka will never take."""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
from confluent_kafka import KafkaException

from tests.fix_kafka import Broker, Record
from tests.fix_postgres import Database
from tests.relay_rig import RelayRig, rows_of
from tests.slot_rig import NewRole, SlotRig, refusal
from tests.waiting import eventually

LIMIT = ("-X", "message.max.bytes=20000")


NewTopics = Callable[[str], str]


@pytest.fixture
def topics(broker: Broker) -> Iterator[NewTopics]:
    """Names of topics that a relay makes, or the test; deleted at its end."""
    with ExitStack() as stack:

        def expect(name: str) -> str:
            stack.callback(_delete, broker, name)
            return name

        yield expect


def _delete(broker: Broker, name: str) -> None:
    with suppress(KafkaException):  # the test may have failed before it was made
        broker.delete_topic(name)


def run(rig: RelayRig, *args: str) -> subprocess.CompletedProcess[str]:
    words = [arg for arg in args if not arg.startswith("-")][: 2 if args[0] == "dead-letters" else 1]
    return rig.command.run(*words, *rig.names, *args[len(words) :])


def done(rig: RelayRig, *args: str) -> str:
    found = run(rig, *args)
    assert found.returncode == 0, found.stderr
    return found.stdout


def archive_all(rig: RelayRig) -> None:
    relay = rig.stream("--purge-every", "50ms", "--archive")
    eventually(lambda: rig.backlog == 0, 20, "all rows are archived")
    assert relay.terminate() == 0


def letters(database: Database) -> int:
    return int(database.fetch_value("select count(*) from outbox_dead_letter"))


def header(record: Record, name: str) -> str:
    return (record.headers[name] or b"").decode()


# -- the archive ----------------------------------------------------------------------------------------------------


def test_the_archive_holds_rows_as_they_were_and_is_trimmed_by_age(rig: RelayRig) -> None:
    rig.database.execute(
        """insert into outbox (task, args, key, headers)
           select 'mail', '{"price": 1.10}', 'k', '{"traceparent": "x"}' from generate_series(1, 10)"""
    )
    query = "select array_agg(to_jsonb(o) - 'archived_at' order by id)::text from {} o"
    before = rig.database.fetch_value(query.format("outbox"))
    archive_all(rig)
    assert rig.database.fetch_value(query.format("outbox_archive")) == before
    rig.database.execute("update outbox_archive set archived_at = now() - interval '8 days' where id <= 4")
    rig.purge("--archive")
    assert rig.database.fetch_value("select count(*) from outbox_archive") == 10
    rig.purge("--archive", "--archive-retain", "7d", "--purge-batch", 3)
    assert rig.database.fetch("select min(id), count(*) from outbox_archive") == [(5, 6)]


def test_a_column_that_the_archive_lacks_is_added_by_init_slot_before_anything_is_lost(ready: SlotRig) -> None:
    ready.database.execute("alter table outbox add column tenant int")
    ready.database.execute("insert into outbox (task, tenant) values ('mail', 7)")
    ready.catch_up()
    relay = ready.stream()
    refusal(ready.run("purge", "--archive"), 3, "tenant", "run `cdc-outbox init-slot`")
    assert ready.backlog == 1
    assert "archive: column tenant added" in ready.run("init-slot").stdout
    assert "1 rows purged" in ready.purge("--archive")
    assert ready.database.fetch("select tenant from outbox_archive") == [(7,)]
    assert relay.terminate() == 0


def test_a_replay_counts_first_and_names_the_old_id_in_a_header(rig: RelayRig) -> None:
    rig.database.execute(
        """insert into outbox (task, args, key, headers, created_at) values
           ('mail', '{"n": 0, "price": 1.10}', 'k', '{"traceparent": "x"}', '2020-01-01'),
           ('mail', '{"n": 1}', null, null, '2020-01-01'),
           ('other', '{"n": 0}', null, null, '2020-01-01')"""
    )
    archive_all(rig)
    assert done(rig, "replay", "--task", "mail", "--dry-run") == "2 archived rows\n"
    assert done(rig, "replay", "--since", "2019-01-01", "--until", "2020-01-01", "--dry-run") == "0 archived rows\n"
    assert done(rig, "replay", "--since", "1h", "--id", "1", "--id", "3", "--dry-run") == "2 archived rows\n"
    assert rig.backlog == 0
    assert done(rig, "replay", "--task", "mail") == "2 archived rows\n2 rows staged again\n"
    assert rig.database.fetch("select id, created_at > now() - interval '1 hour' from outbox") == [(4, True), (5, True)]
    rig.catch_up()
    first, second, _, *again = rig.read()
    for old, new in zip((first, second), again, strict=True):
        assert (new.key, new.value, header(new, "replay_of")) == (old.key, old.value, header(old, "id"))
    assert [header(record, "id") for record in again] == ["4", "5"]
    assert header(again[0], "traceparent") == "x"
    assert rig.database.fetch_value("select count(*) from outbox_archive") == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give --since, --until, --task or --id"),
        (["--since", "yesteryear"], "neither a duration such as 2h nor a time"),
    ],
)
def test_a_replay_of_everything_is_not_the_default(rig: RelayRig, options: list[str], words: str) -> None:
    refusal(run(rig, "replay", *options), 2, words)


# -- dead letters ---------------------------------------------------------------------------------------------------


def set_aside(rig: RelayRig) -> None:
    """Row 1 is sent, 2 and 3 are dead letters."""
    rig.stage("small")
    rig.stage("large", 2, padding=30_000)
    rig.catch_up(*LIMIT, "--on-poison", "dead-letter")
    assert letters(rig.database) == 2


@pytest.mark.parametrize("purged", [True, False])
def test_a_dead_letter_that_is_retried_keeps_its_id_and_arrives_whole(rig: RelayRig, purged: bool) -> None:
    rig.database.execute("insert into outbox (task, headers) values ('small', '{\"a\": \"b\"}')")
    set_aside(rig)
    row = "select array_agg(to_jsonb(o) order by id)::text from outbox o where task = 'large'"
    before = rig.database.fetch_value(row)
    if purged:
        relay = rig.stream()
        rig.purge()
        assert relay.terminate() == 0
        assert rig.backlog == 0
    assert done(rig, "dead-letters", "retry", "--id", "99") == "0 rows staged again\n"
    assert done(rig, "dead-letters", "retry", "--task", "large") == "2 rows staged again\n"
    assert rig.database.fetch_value(row) == before
    assert letters(rig.database) == 0
    rig.catch_up()
    assert [header(record, "id") for record in rig.read()][-2:] == ["3", "4"]


def test_dead_letters_are_listed_without_their_values_and_discarded_by_id(rig: RelayRig) -> None:
    assert done(rig, "dead-letters", "list") == "no dead letters\n"
    set_aside(rig)
    text = done(rig, "dead-letters", "list")
    assert text.count("row id=") == 2
    assert "row id=2 task=large, 30" in text
    assert "limit 20000 bytes" in text
    listed = json.loads(done(rig, "dead-letters", "list", "--json"))
    assert [letter["row_id"] for letter in listed] == ["2", "3"]
    assert "MSG_SIZE_TOO_LARGE" in listed[0]["error"]
    assert "padding" not in text + json.dumps(listed)
    refusal(run(rig, "dead-letters", "discard"), 2, "give --id or --task, or --all")
    assert done(rig, "dead-letters", "discard", "--id", "2") == "1 dead letters discarded\n"
    assert done(rig, "dead-letters", "discard", "--all") == "1 dead letters discarded\n"
    assert letters(rig.database) == 0


def test_a_dead_letter_that_may_not_be_stored_halts_the_relay_where_it_is(ready: SlotRig, new_role: NewRole) -> None:
    role = new_role(ready, "login replication", "relay")
    assert ready.run("init-slot", "--relay-role", role).returncode == 0
    ready.database.execute(f"revoke insert on outbox_dead_letter from {role}")
    ready.stage(padding=30_000)
    behind = ready.stage("behind", 3)
    position = ready.confirmed
    ready.user = role
    halted = ready.run("stream", *LIMIT, "--on-poison", "dead-letter")
    refusal(halted, 3, "storing a dead letter", "42501")
    assert ready.confirmed == position
    ready.database.execute(f"grant insert on outbox_dead_letter to {role}")
    ready.catch_up(*LIMIT, "--on-poison", "dead-letter")
    assert letters(ready.database) == 1
    assert rows_of(ready.read())[-3:] == behind


# -- topics ---------------------------------------------------------------------------------------------------------


@pytest.mark.kafka_only
def test_a_topic_that_is_missing_is_waited_for_and_makes_no_dead_letter(
    rig: RelayRig, broker: Broker, topics: NewTopics
) -> None:
    """C43 (confluentinc/librdkafka#2858 and #4904)."""
    options = ("--topic", f"{rig.topic}.{{task}}", "--on-poison", "dead-letter")
    first = rig.stage(count=3)
    relay = rig.stream(*options)
    relay.wait_for_log("starting over", 30)
    poison = rig.stage("no topic / has this name")
    rows = first + rig.stage(count=3)
    assert letters(rig.database) == 0
    name = broker.create_topic(topics(f"{rig.topic}.mail"))
    assert rows_of(broker.read(name, until=lambda found: len(found) >= 6)) == rows
    eventually(lambda: letters(rig.database) == len(poison), 10, "the illegal name is poison")
    assert relay.terminate() == 0


@pytest.mark.kafka_only
def test_topics_are_created_for_those_who_ask_for_it(rig: RelayRig, broker: Broker, topics: NewTopics) -> None:
    for template, tasks in ((f"{rig.topic}.fixed", [""]), (f"{rig.topic}_{{task}}", ["mail", "other"])):
        rows = rig.stage(count=3) + rig.stage("other", 3)
        names = [topics(template.format(task=task)) for task in tasks]
        log = rig.catch_up("--topic", template, "--create-topics", "--topic-partitions", "3")
        for name in names:
            assert f"topic {name} created" in log
            assert len(broker.admin.list_topics(name, timeout=5).topics[name].partitions) == 3
        assert {row for name in names for row in rows_of(broker.read(name))} == set(rows)
