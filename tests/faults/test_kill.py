"""A crash at any instant loses nothing (G3), and a clean stop repeats nothing."""

import random

import pytest

from tests.fix_kafka import CreateTopic
from tests.relay_rig import Load, RelayRig, check_deaths, standard_check
from tests.waiting import eventually

KILLS = 20
STOPS = 10
PURGING = ("--purge-every", "500ms")


def records_after(rig: RelayRig, count: int) -> None:
    """Returns when `count` more records are in the topic."""
    end = sum(rig.ends().values()) + count
    eventually(lambda: sum(rig.ends().values()) >= end, 30, f"{count} more records")


@pytest.mark.slow
def test_twenty_kills_under_load_lose_nothing(rig: RelayRig, topic: CreateTopic) -> None:
    choice = random.Random(20)
    rig.topic = topic(partitions=3)
    deaths = []
    with Load(rig, seed=20) as load:
        for _ in range(KILLS):
            relay = rig.start(*PURGING)
            relay.wait_for_log("streaming ")
            records_after(rig, int(1000 * choice.random() ** 2))
            relay.kill9()
            deaths.append(rig.death())
    rig.stream(*PURGING)
    eventually(lambda: rig.backlog == 0, 30, "everything is relayed and purged")
    records = rig.read()
    repeats = standard_check(load.committed, load.rolled_back, records)
    check_deaths(deaths, records)
    print(f"{len(deaths)} kills, {len(load.committed)} rows, {len(load.rolled_back)} rolled back, {repeats} repeats")


@pytest.mark.slow
def test_ten_clean_stops_under_load_repeat_and_lose_nothing(rig: RelayRig, topic: CreateTopic) -> None:
    """C48 (Trendyol/go-pq-cdc#148 and #149, fluent/fluent-bit#5598)."""
    choice = random.Random(10)
    rig.topic = topic(partitions=3)
    with Load(rig, seed=10) as load:
        for _ in range(STOPS):
            relay = rig.stream(*PURGING)
            records_after(rig, int(1000 * choice.random() ** 2))
            assert relay.terminate() == 0
            assert "not everything was acknowledged" not in relay.stderr_text()
    rig.catch_up()
    assert standard_check(load.committed, load.rolled_back, rig.read()) == 0
    print(f"{STOPS} stops, {len(load.committed)} rows, {len(load.rolled_back)} rolled back, no repeats")
