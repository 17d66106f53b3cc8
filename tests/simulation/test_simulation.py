"""Nothing is lost, overtaken or confirmed too early, whatever happens between any two steps of the relay's loop."""

import pytest

from tests.simulation.world import World, run

SCHEDULES = 1600
CHUNK = 200
"""Schedules in one test, so that several processes share them."""


@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_every_promise_is_kept_in_every_schedule(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run(seed)


def test_a_schedule_is_played_again_from_its_seed_alone() -> None:
    for seed in range(20):
        ends = []
        for _ in range(2):
            world = World(seed)
            world.run()
            ends.append((world.clock.now, world.postgres, world.kafka))
        assert ends[0] == ends[1]


def test_the_schedules_hold_what_they_are_meant_to() -> None:
    """Else they would prove nothing: rows, repeats after a restart, rows set aside, slots moved by hand."""
    worlds = [World(seed) for seed in range(200)]
    for world in worlds:
        world.run()
    assert sum(len(world.kafka.stored) for world in worlds) > 2000
    assert sum(world.kafka.records - len(world.kafka.stored) for world in worlds) > 100
    assert sum(len(world.postgres.dead_letters) for world in worlds) > 5
    assert sum(world.gap_expected for world in worlds) > 5
    assert max(len(world.postgres.transactions) for world in worlds) > 20
