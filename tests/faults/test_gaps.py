"""The slot, the publication or the table is no longer what `init-slot` made: noticed, nothing purged, nothing lost."""

from collections.abc import Callable

import pytest
from psycopg.conninfo import make_conninfo

from tests.fix_command import Running
from tests.fix_postgres import StartPostgres
from tests.fix_proxy import StartProxy
from tests.relay_rig import Row, readiness
from tests.slot_rig import NewRig, SlotRig, Writer
from tests.waiting import eventually

RECREATED = "re-created or advanced by someone else"


def refused_and_nothing_deleted(rig: SlotRig, *words: str) -> None:
    """By relay and purge, with the way back."""
    rows = rig.backlog
    assert rows
    for name in ("stream", "purge"):
        rig.refused(name, 4, *words, "cdc-outbox init-slot")
    assert rig.backlog == rows


def way_back(rig: SlotRig, rows: list[Row]) -> None:
    """`init-slot` brings every row that is in the table, and then all is well."""
    rig.init()
    rows = rows + rig.stage(count=2)
    relay = rig.stream("--purge-every", "200ms")
    rig.wait_for(rows)
    eventually(lambda: rig.backlog == 0, 15, "all rows are purged")
    assert relay.terminate() == 0


# -- the slot -------------------------------------------------------------------------------------------------------


def test_a_slot_dropped_with_rows_not_relayed(ready: SlotRig) -> None:
    """C30 (debezium/debezium#3970, ConduitIO/conduit-connector-postgres#146)."""
    rows = ready.stage(count=10)
    ready.drop_slot()
    rows += ready.stage(count=10)
    refused_and_nothing_deleted(ready, f"slot {ready.slot} does not exist")
    assert not ready.slot_exists()
    way_back(ready, rows)


def test_a_slot_re_created_by_hand(ready: SlotRig) -> None:
    """C30."""
    relayed = ready.stage(count=3)
    ready.catch_up()
    rows = ready.stage(count=3)
    ready.drop_slot()
    ready.create_slot()
    rows += ready.stage(count=3)
    refused_and_nothing_deleted(ready, RECREATED)
    way_back(ready, relayed + rows)


def test_a_slot_re_created_by_hand_of_a_relay_that_never_ran(ready: SlotRig) -> None:
    ready.drop_slot()
    rows = ready.stage(count=3)
    ready.create_slot()
    refused_and_nothing_deleted(ready, RECREATED)
    way_back(ready, rows)


def test_a_slot_advanced_by_hand(ready: SlotRig) -> None:
    rows = ready.stage(count=3)
    ready.alter(f"select pg_replication_slot_advance('{ready.slot}', pg_current_wal_lsn())")
    refused_and_nothing_deleted(ready, RECREATED)
    way_back(ready, rows)


def test_a_slot_read_by_hand(ready: SlotRig) -> None:
    rows = ready.stage(count=3)
    ready.alter(
        f"select count(*) from pg_logical_slot_get_binary_changes('{ready.slot}', null, null, 'proto_version', '1',"
        f" 'publication_names', '{ready.publication}')"
    )
    refused_and_nothing_deleted(ready, RECREATED)
    way_back(ready, rows)


def test_a_slot_that_nobody_made_for_us(ready: SlotRig) -> None:
    rows = ready.stage(count=3)
    ready.alter("delete from outbox_checkpoint")
    refused_and_nothing_deleted(ready, "not made by")
    ready.alter("drop table outbox_checkpoint")
    for name in ("stream", "purge"):
        ready.refused(name, 3, "outbox_checkpoint", "init-slot")
    way_back(ready, rows)


def test_a_slot_lost_to_max_slot_wal_keep_size(postgres_server: StartPostgres, new_rig: NewRig) -> None:
    """C32 (readysettech/readyset#239, powersync-ja/powersync-service#387)."""
    server = postgres_server(max_slot_wal_keep_size="1MB", min_wal_size="32MB", max_wal_size="32MB")
    rig = new_rig(server)
    rig.init()
    rows = rig.stage(count=100)

    def lost() -> bool:
        rig.alter("select pg_switch_wal()", "create table if not exists w (i int)", "insert into w values (1)")
        rig.alter("checkpoint")
        return bool(rig.database.fetch("select from pg_replication_slots where wal_status = 'lost'"))

    eventually(lost, 30, "the slot is lost")
    rows += rig.stage(count=1)
    refused_and_nothing_deleted(rig, f"slot {rig.slot} is lost")
    assert "dropped: it was lost" in rig.run("init-slot").stdout
    way_back(rig, rows)


def test_a_slot_dropped_under_a_running_relay(ready: SlotRig) -> None:
    """C30."""
    relay = ready.stream()
    relayed = ready.stage(count=3)
    ready.wait_for(relayed)
    ready.drop_slot()
    rows = ready.stage(count=3)
    assert relay.wait() == 4
    assert "cdc-outbox init-slot" in relay.stderr_text().splitlines()[-1]
    refused_and_nothing_deleted(ready, "does not exist")
    way_back(ready, relayed + rows)


def test_a_slot_re_created_under_a_running_relay(ready: SlotRig) -> None:
    relay = ready.stream()
    relayed = ready.stage(count=3)
    ready.wait_for(relayed)
    relay.pause()  # or it would be quicker
    ready.drop_slot()
    rows = ready.stage(count=3)
    ready.create_slot()
    relay.resume()
    assert relay.wait() == 4
    assert RECREATED in relay.stderr_text().splitlines()[-1]
    refused_and_nothing_deleted(ready, RECREATED)
    way_back(ready, relayed + rows)


def test_a_moving_relay_is_not_taken_for_a_moved_slot(ready: SlotRig, proxy: StartProxy) -> None:
    """A purge that is far away compares slot and checkpoint while both move between its questions."""
    relay = ready.stream("--check-every", "1ms")
    far = proxy(ready.database.server.port)
    far.slow(delay=0.1)
    with Writer(ready) as writer:
        done = ready.run("purge", "--dsn", make_conninfo(ready.dsn, port=far.port))
    assert done.returncode == 0, done.stderr
    ready.wait_for(writer.rows)
    assert relay.terminate() == 0


# -- publication and table ------------------------------------------------------------------------------------------

OUTBOX = """
create table outbox (id bigint generated always as identity primary key, task text not null, args jsonb not null)"""
CREATE = "create publication {publication} for table outbox with (publish = 'insert', publish_via_partition_root)"

# What a migration does, what it does after some rows, and what the relay calls it.
CHANGES: dict[str, tuple[list[str], list[str], str]] = {
    "table dropped and re-created": (["drop table outbox", OUTBOX], [], "the table was dropped and re-created"),
    "table re-created and published again": (
        ["drop table outbox", OUTBOX, "alter publication {publication} add table outbox"],
        [],
        "the table was dropped and re-created",
    ),
    "table swapped for a copy": (
        [
            "begin; create table copy (like outbox including all); alter table outbox rename to outbox_old;"
            " alter table copy rename to outbox; commit"
        ],
        [],
        "another one took its name",
    ),
    "table taken out of the publication": (
        ["alter publication {publication} drop table outbox"],
        [],
        "taken out of the publication",
    ),
    "table out of the publication for a minute": (
        ["alter publication {publication} drop table outbox"],
        ["alter publication {publication} add table outbox"],
        "taken out of the publication|entry for the table was altered|the publication was altered",
    ),
    "publication dropped": (["drop publication {publication}"], [], "publication"),
    "publication renamed": (["alter publication {publication} rename to elsewhere"], [], "publication"),
    "publication re-created": (["drop publication {publication}"], [CREATE], "publication"),
    "inserts no longer published": (
        ["alter publication {publication} set (publish = 'update')"],
        [],
        "the publication was altered",
    ),
    "a row filter": (
        ["alter publication {publication} set table outbox where (id < 0)"],
        [],
        "the publication's entry for the table was altered|taken out of the publication|the publication was altered",
    ),
}


def staged_in_the_change(rig: SlotRig, change: str) -> list[Row]:
    """Do it; the rows that it keeps from the stream."""
    before, after, _ = CHANGES[change]
    rig.alter(*before)
    rows = rig.stage("late", count=3)
    rig.alter(*after)
    return rows + rig.stage("late", count=3)


def ends_with(relay: Running, change: str) -> None:
    assert relay.wait() == 4, relay.stderr_text()
    said = relay.stderr_text().splitlines()[-1]
    assert any(words in said for words in CHANGES[change][2].split("|")), said
    assert "cdc-outbox init-slot" in said


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_within_the_check_interval(ready: SlotRig, change: str) -> None:
    """C34 (zalando/postgres-operator#2085, npgsql/npgsql#6176)."""
    relay = ready.stream("--check-every", "1s")
    rows = ready.stage(count=3)
    ready.wait_for(rows)
    late = staged_in_the_change(ready, change)
    ends_with(relay, change)
    refused_and_nothing_deleted(ready)
    way_back(ready, late)


@pytest.mark.parametrize(
    "change", ["table dropped and re-created", "table out of the publication for a minute", "publication re-created"]
)
def test_a_change_is_noticed_by_the_next_purge(ready: SlotRig, change: str) -> None:
    relay = ready.stream("--check-every", "10min", "--purge-every", "300ms")
    ready.stage(count=3)
    eventually(lambda: ready.backlog == 0, 10, "it purges")
    late = staged_in_the_change(ready, change)
    ends_with(relay, change)
    kept = ready.backlog
    assert kept >= len(late)
    refused_and_nothing_deleted(ready)
    way_back(ready, late)


def test_a_change_while_no_relay_runs(ready: SlotRig) -> None:
    rows = ready.stage(count=3)
    late = staged_in_the_change(ready, "table out of the publication for a minute")
    refused_and_nothing_deleted(ready)
    way_back(ready, rows + late)


def test_a_renamed_table(ready: SlotRig) -> None:
    """C23."""
    relay = ready.stream("--check-every", "10min")
    rows = ready.stage(count=3)
    ready.wait_for(rows)
    ready.alter("alter table outbox rename to jobs")
    ready.alter("insert into jobs (task, args) values ('jobs', '{{\"n\": 0}}')")  # noticed with its first row
    assert relay.wait() == 4
    assert "now called public.jobs" in relay.stderr_text()
    for name in ("stream", "purge"):
        ready.refused(name, 3, "table outbox does not exist", "--table")
    ready.table = "jobs"
    assert ready.backlog == 4
    for name in ("stream", "purge"):
        ready.refused(name, 3, "jobs_checkpoint", "init-slot")
    assert ready.backlog == 4
    ready.init()
    ready.catch_up()
    ready.wait_for([*rows, ("jobs", 0)])


# -- unattended -----------------------------------------------------------------------------------------------------


def drop_slot(rig: SlotRig) -> list[Row]:
    rig.drop_slot()
    return rig.stage("late", count=3)


def recreate_slot(rig: SlotRig) -> list[Row]:
    rig.drop_slot()
    rows = rig.stage("late", count=3)
    rig.create_slot()
    return rows


def changing(change: str) -> Callable[[SlotRig], list[Row]]:
    return lambda rig: staged_in_the_change(rig, change)


GAPS = {
    "slot dropped": drop_slot,
    "slot re-created": recreate_slot,
    "table re-created": changing("table dropped and re-created"),
    "table out for a minute": changing("table out of the publication for a minute"),
    "publication re-created": changing("publication re-created"),
}


@pytest.mark.parametrize("gap", ["slot dropped", "slot re-created", "table out for a minute"])
def test_recovery_at_the_start_needs_nobody(ready: SlotRig, gap: str) -> None:
    rows = ready.stage(count=3)
    late = GAPS[gap](ready)
    relay = ready.stream("--on-gap", "recover", "--purge-every", "300ms")
    ready.wait_for(rows + late)
    eventually(lambda: ready.backlog == 0, 15, "all rows are purged")
    assert relay.terminate() == 0


@pytest.mark.parametrize("gap", ["slot dropped", "table re-created", "publication re-created"])
def test_recovery_while_running_needs_nobody(ready: SlotRig, gap: str) -> None:
    relay = ready.stream("--on-gap", "recover", "--purge-every", "300ms", "--check-every", "300ms")
    rows = ready.stage(count=3)
    ready.wait_for(rows)
    late = GAPS[gap](ready)
    ready.wait_for(late)
    eventually(lambda: ready.backlog == 0, 15, "all rows are purged")
    assert "recovering, as --on-gap recover says" in relay.stderr_text()
    assert relay.terminate() == 0


def test_a_recovery_that_waits_is_not_ready_and_can_be_stopped(ready: SlotRig) -> None:
    relay = ready.stream("--on-gap", "recover")
    other = ready.database.connect(autocommit=False)
    other.execute("select pg_current_xact_id()")
    ready.drop_slot()
    eventually(lambda: readiness(relay)[0] == 503, 10, "it is not ready")
    eventually(lambda: ready.slot_exists(), 10, "it makes the slot")
    assert readiness(relay)[0] == 503
    assert relay.terminate(8) == 0
    assert not ready.slot_exists()
    other.rollback()


def test_two_relays_recover_at_the_same_time(ready: SlotRig) -> None:
    options = ["--on-gap", "recover", "--purge-every", "300ms"]
    first = ready.stream(*options)
    second = ready.start(*options)
    second.wait_for_log("standby: ")
    rows = ready.stage(count=3)
    ready.wait_for(rows)
    rows += drop_slot(ready)
    ready.wait_for(rows)
    rows += ready.stage(count=3)
    ready.wait_for(rows)
    eventually(lambda: ready.backlog == 0, 15, "all rows are purged")
    assert first.terminate() == 0
    assert second.terminate() == 0
