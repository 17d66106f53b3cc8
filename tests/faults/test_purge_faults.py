"""The purge beside everything that can get in its way: exactly the relayed rows go, each to one place."""

import re
from typing import Any

import psycopg
import pytest

from tests.fix_command import Running
from tests.relay_rig import RelayRig, rows_of
from tests.slot_rig import SlotRig
from tests.waiting import eventually

ARCHIVED = "select count(*), count(distinct id) from outbox_archive"
PURGE_WAITS = """
select l.pid from pg_locks l join pg_stat_activity a using (pid)
where not l.granted and l.database = (select oid from pg_database where datname = current_database())
  and a.application_name = 'cdc-outbox' and a.query ~ 'purged'"""


def start_purge(rig: RelayRig, *options: object) -> Running:
    return rig.command.start("purge", *rig.names, *options)


def wait_until_it_has_looked(listener: psycopg.Connection[Any]) -> None:
    """It asks for the position behind the rows that it saw."""
    assert list(listener.notifies(timeout=20, stop_after=1)), "no purge asked for a position"


def listen(rig: RelayRig) -> psycopg.Connection[Any]:
    listener = rig.database.connect()
    listener.execute(f'listen "{rig.slot}"'.encode())
    return listener


def waiting_purge(rig: RelayRig) -> int:
    """The pid of its backend, once it waits for a lock inside a batch."""
    found = eventually(lambda: rig.database.fetch(PURGE_WAITS), 20, "a batch waits for a lock")
    return int(found[0][0])


def test_what_commits_after_the_look_stays_though_its_ids_are_lower(rig: RelayRig) -> None:
    relay = rig.stream()
    late, prepared = rig.database.connect(autocommit=False), rig.database.connect(autocommit=False)
    rows = rig.stage("late", on=late)
    with prepared.transaction():
        rows += rig.stage("prepared", 2, on=prepared)
        prepared.execute(f"prepare transaction '{rig.slot}'".encode())
    asynchronous = rig.database.connect()
    asynchronous.execute("set synchronous_commit = off")
    listener = listen(rig)
    relay.pause()
    seen = rig.stage(count=40) + rig.stage("off", 7, on=asynchronous)
    purge = start_purge(rig)
    wait_until_it_has_looked(listener)
    late.commit()
    rig.database.execute(f"commit prepared '{rig.slot}'")
    relay.resume()

    assert purge.wait() == 0
    assert "47 rows purged" in purge.stdout_text()
    assert rig.database.fetch("select id from outbox order by id") == [(1,), (2,), (3,)]
    assert set(rows_of(rig.wait_for(rows + seen))) == {*rows, *seen}
    assert "3 rows purged" in rig.purge()
    assert relay.terminate() == 0


def test_a_row_that_a_savepoint_or_an_update_wrote_goes_only_once_it_is_settled(rig: RelayRig) -> None:
    """The application keeps locks, writes in subtransactions and changes a row after the purge has seen it."""
    relay = rig.stream()
    open_writer = rig.database.connect(autocommit=False)
    with open_writer.transaction(), open_writer.transaction():
        rig.stage("inner", 1, on=open_writer)
        rig.stage(count=20)
        listener = listen(rig)
        relay.pause()
        purge = start_purge(rig)
        wait_until_it_has_looked(listener)
        rig.database.execute("update outbox set key = 'changed' where id = 5")
        relay.resume()
        assert purge.wait() == 0
        assert "19 rows purged" in purge.stdout_text()
        holder = rig.database.connect(autocommit=False)
        holder.execute("select from outbox where id = 5 for update")
        assert "0 rows purged" in rig.purge()
        holder.rollback()
        assert "1 rows purged" in rig.purge()
    eventually(lambda: rig.backlog == 1, 5, "the inner row is committed")
    rig.wait_for([("inner", 0)])
    assert "1 rows purged" in rig.purge()
    assert relay.terminate() == 0


def test_a_new_row_in_the_place_of_one_that_was_seen_stays(rig: RelayRig) -> None:
    relay = rig.stream()
    listener = listen(rig)
    relay.pause()
    rig.stage(count=10)
    purge = start_purge(rig)
    wait_until_it_has_looked(listener)
    places = rig.database.fetch("select ctid::text from outbox")
    rig.database.execute("delete from outbox")
    rig.database.execute("vacuum outbox")
    rig.stage("new", 10)
    assert rig.database.fetch("select ctid::text from outbox") == places
    relay.resume()
    assert purge.wait() == 0
    assert "0 rows purged" in purge.stdout_text()
    assert rig.backlog == 10
    assert relay.terminate() == 0


def test_a_purge_that_waits_for_the_slot_holds_up_no_alter_table(rig: RelayRig) -> None:
    """C54 (Particular/NServiceBus.Persistence.Sql#778)."""
    rig.stage(count=10)
    listener = listen(rig)
    purge = start_purge(rig)
    wait_until_it_has_looked(listener)
    with rig.database.connect(autocommit=False) as migration:
        migration.execute("set lock_timeout = '300ms'")
        migration.execute("alter table outbox add column note text")
    assert purge.running
    assert purge.wait() == 0
    assert "the slot is not there yet" in purge.stdout_text()
    assert rig.backlog == 10


def test_a_lock_timeout_a_lost_connection_and_a_slow_statement_end_one_round_or_none(rig: RelayRig) -> None:
    """C54, C50."""
    relay = rig.stream("--purge-every", "100ms", "--archive")
    purge = start_purge(rig, "--every", "100ms", "--archive")
    holder = rig.database.connect(autocommit=False)
    holder.execute("lock table outbox_archive in share mode")
    rows = rig.stage(count=30)
    purge.wait_for_log("lock timeout (55P03); the next round tries again")
    relay.wait_for_log("lock timeout (55P03)")
    assert rows_of(rig.wait_for(rows)) == rows  # stuck purges do not hold up the stream
    rig.database.execute("select pg_terminate_backend(%s)", (waiting_purge(rig),))
    eventually(lambda: "57P01" in purge.stderr_text() + relay.stderr_text(), 20, "a purge lost its connection")
    holder.rollback()
    eventually(lambda: rig.backlog == 0, 20, "the purges have recovered")
    assert rig.database.fetch(ARCHIVED) == [(30, 30)]
    assert purge.terminate() == 0
    assert relay.terminate() == 0


def test_a_limit_for_the_statements_of_applications_is_survived(rig: RelayRig) -> None:
    """C54."""
    rig.database.execute(f"alter database {rig.database.name} set statement_timeout = '1s'")
    rig.database.execute(
        "create function slow() returns trigger language plpgsql as 'begin perform pg_sleep(1.1); return null; end'"
    )
    rig.database.execute("create trigger slow after delete on outbox for each statement execute function slow()")
    rig.stage(count=5)
    relay = rig.stream()
    assert "5 rows purged" in rig.purge()
    assert relay.terminate() == 0


def test_two_purges_at_once_do_no_harm(rig: RelayRig) -> None:
    """C54 (JasperFx/wolverine#3120)."""
    rows = rig.stage(count=3000)
    purges = [start_purge(rig, "--every", "20ms", "--purge-batch", 25, "--archive") for _ in range(2)]
    relay = rig.stream("--purge-every", "20ms", "--purge-batch", "10", "--archive")
    eventually(lambda: rig.backlog == 0, 40, "everything is purged")
    assert [purge.terminate() for purge in [*purges, relay]] == [0, 0, 0]
    assert rig.database.fetch(ARCHIVED) == [(3000, 3000)]
    assert not any("error" in purge.stderr_text() or "tries again" in purge.stderr_text() for purge in purges)
    assert rows_of(rig.read()) == rows


def test_a_purge_killed_in_mid_batch_leaves_each_row_in_one_place(rig: RelayRig) -> None:
    rig.stage(count=400)
    rig.catch_up()
    relay = rig.stream("--purge-every", "off")
    holder = rig.database.connect(autocommit=False)
    for moved in (0, 7):
        if moved:  # in the middle of a round
            rig.database.execute(
                """create function stop() returns trigger language plpgsql as 'begin
                if new.id > 7 then lock table outbox_checkpoint in share mode; end if; return new; end'"""
            )
            rig.database.execute(
                "create trigger stop before insert on outbox_archive for each row execute function stop()"
            )
            holder.execute("lock table outbox_checkpoint in row exclusive mode")
        else:
            holder.execute("lock table outbox_archive in share mode")
        purge = start_purge(rig, "--archive", "--purge-batch", 1)
        backend = waiting_purge(rig)
        purge.kill9()
        holder.rollback()
        eventually(
            lambda pid=backend: not rig.database.fetch("select from pg_stat_activity where pid = %s", (pid,)),  # type: ignore[misc]
            20,
            "its backend is gone",
        )
        both = "select id from outbox union all select id from outbox_archive order by id"
        assert rig.database.fetch(both) == [(n + 1,) for n in range(400)]
    rig.database.execute("drop trigger stop on outbox_archive")
    rig.purge("--archive")
    assert rig.backlog == 0
    assert rig.database.fetch(ARCHIVED) == [(400, 400)]
    assert relay.terminate() == 0


@pytest.mark.parametrize("accident", ["dropped", "created again"])
def test_nothing_goes_when_the_slot_is_not_the_one_that_was_set_up(ready: SlotRig, accident: str) -> None:
    ready.stage(count=10)
    ready.drop_slot()
    if accident == "created again":
        ready.create_slot()
    ready.refused("purge", 4, "run `cdc-outbox init-slot`")
    assert ready.backlog == 10


def test_a_purge_run_on_and_on_ends_when_the_slot_is_gone(ready: SlotRig) -> None:
    purge = start_purge(ready, "--every", "50ms")
    ready.stage(count=3)
    eventually(lambda: re.search(r"0 rows purged; the slot is not there yet", purge.stdout_text()), 20)
    ready.drop_slot()
    assert purge.wait() == 4
    assert ready.backlog == 3
