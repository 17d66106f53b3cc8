"""kill -9 at each named place (sitecustomize.py): nothing is lost, and each row is in one place.

`make failpoints` tries each place five times, each time at another of its calls.
"""

import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.failpoints.sitecustomize import DEAD_LETTER, INIT_SLOT, PLACES, PURGE, STOP, STREAM
from tests.fix_command import Running
from tests.fix_kafka import CreateTopic
from tests.relay_rig import Load, RelayRig, check_deaths, rows_of, standard_check
from tests.slot_rig import SlotRig, Writer
from tests.waiting import eventually

HERE = str(Path(__file__).parent)
FIRST_CALL = {"after the slot was taken"}
"""Comes once in a process's life."""
OVERSIZE = ("--on-poison", "dead-letter", "-X", "message.max.bytes=20000")


def start(rig: RelayRig, place: str, call: int, name: str, *options: object) -> Running:
    path = os.pathsep.join(filter(None, (HERE, os.environ.get("PYTHONPATH"))))
    env = {"PYTHONPATH": path, "FAILPOINT": f"{place}:{call}"}
    return rig.command.start(name, *options, env=env)


def died(process: Running) -> None:
    assert process.wait(40) == -signal.SIGKILL, process.stderr_text()


def test_every_place_is_one_of_a_process_that_is_killed() -> None:
    assert len(PLACES) == sum(map(len, (STREAM, DEAD_LETTER, STOP, PURGE, INIT_SLOT)))
    assert len(PLACES) >= 25


@pytest.mark.kafka_only  # tansu tells a wrong end of a partition
def test_a_relay_killed_anywhere_loses_nothing(
    rig: RelayRig, topic: CreateTopic, rounds: range, kills: Counter[str]
) -> None:
    choice = random.Random(12)
    rig.topic = topic(partitions=2)
    deaths, places = [], []
    with Load(rig, seed=12) as load:
        for turn in rounds:
            for place in choice.sample(list(STREAM), len(STREAM)):
                call = 1 if place in FIRST_CALL else choice.randint(1, 4 + 8 * turn)
                died(start(rig, place, call, "stream", *rig.stream_options))
                deaths.append(rig.death())
                places.append(place)
            for place in STOP:
                relay = start(rig, place, 1, "stream", *rig.stream_options)
                relay.wait_for_log("streaming ")
                end = sum(rig.ends().values())
                eventually(lambda end=end: sum(rig.ends().values()) > end, 30, "rows are relayed")  # type: ignore[misc]
                relay.signal(signal.SIGTERM)
                died(relay)
                deaths.append(rig.death())
                places.append(place)
    rig.catch_up()
    records = rig.read()
    standard_check(load.committed, load.rolled_back, records)
    check_deaths(deaths, records)
    kills.update(places)


@pytest.mark.kafka_only  # tansu tells a wrong end of a partition
def test_a_dead_letter_is_stored_once_whatever_dies(rig: RelayRig, rounds: range, kills: Counter[str]) -> None:
    rows, letters = [], 0
    for _ in rounds:
        for place in DEAD_LETTER:
            rows += rig.stage(count=3)
            rig.stage("large", padding=30_000)
            letters += 1
            rows += rig.stage(count=3)
            died(start(rig, place, 1, "stream", *rig.stream_options, *OVERSIZE))
            death = rig.death()
            rig.catch_up(*OVERSIZE)
            records = rig.read()
            standard_check(rows, [], records)
            check_deaths([death], records)
            count, distinct = rig.database.fetch("select count(*), count(distinct row_id) from outbox_dead_letter")[0]
            assert (count, distinct) == (letters, letters)
            kills[place] += 1


@pytest.mark.parametrize("archive", [True, False], ids=["archive", "delete"])
def test_a_purge_killed_anywhere_leaves_each_row_in_one_place(
    rig: RelayRig, rounds: range, kills: Counter[str], archive: bool
) -> None:
    choice = random.Random(5)
    options = (*rig.names, "--purge-batch", 10, *(["--archive"] if archive else []))
    rows = []
    relay = rig.stream()
    for turn in rounds:
        for place in PURGE:
            new = rig.stage(count=50)
            rows += new
            rig.wait_for(new)
            before = rig.backlog
            call = 1 if place == "after the purge has looked" else choice.randint(1, 5)
            purge = start(rig, place, call, "purge", *options)
            died(purge)
            eventually(lambda: not purging(rig), 20, "its backend is gone")
            if archive:
                both = "select id from outbox union all select id from outbox_archive order by id"
                assert rig.database.fetch(both) == [(n + 1,) for n in range(len(rows))]
            assert rig.backlog <= before
            if turn == rounds[-1]:
                rig.purge(*options[len(rig.names) :])
                assert rig.backlog == 0
            kills[place] += 1
    assert relay.terminate() == 0
    assert standard_check(rows, [], rig.read()) == 0


def purging(rig: RelayRig) -> bool:
    """Is there a session besides the relay's two and the one that asks?"""
    query = "select count(*) from pg_stat_activity where datname = current_database() and backend_type <> 'walsender'"
    return int(rig.database.fetch_value(query)) > 2


def test_an_init_slot_killed_anywhere_is_mended_by_the_next(fresh: SlotRig, rounds: range, kills: Counter[str]) -> None:
    """Rows from before it, and rows that are written all the while."""
    fresh.init()
    rows = []
    for _ in rounds:
        for place in INIT_SLOT:
            rows += fresh.stage("before", 5)
            if fresh.slot_exists():
                fresh.drop_slot()
            if place == "before the publication is made":
                fresh.alter("drop publication {publication}")
            with Writer(fresh) as writer:
                died(start(fresh, place, 1, "init-slot", *fresh.names))
                eventually(lambda: not others(fresh), 20, "its backends are gone")
                fresh.init()
            rows += writer.rows
            rows += fresh.stage("after", 5)
            fresh.catch_up()
            assert set(rows) <= set(rows_of(fresh.read()))
            assert fresh.backlog == len(rows)
            assert fresh.database.fetch_value("select count(distinct id) from outbox") == len(rows)
            kills[place] += 1


def others(rig: SlotRig) -> int:
    """Sessions of the command."""
    query = "select count(*) from pg_stat_activity where datname = current_database() and application_name = %s"
    return int(rig.database.fetch_value(query, ("cdc-outbox",)))
