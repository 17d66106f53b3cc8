"""The way back through the WAL: rows of one key come back in the order in which they were staged."""

import pytest

from tests.relay_rig import rows_of
from tests.slot_rig import SlotRig

IN_PLACE = "select array_agg((args->>'n')::int order by ctid) from outbox"


def stage_out_of_place(rig: SlotRig) -> None:
    """The younger rows stand in front, where a vacuum has made room, as after any purge."""
    rig.stage(count=600, padding=100)
    rig.alter("delete from outbox where (args->>'n')::int < 300", "vacuum outbox")
    rig.stage(count=200, padding=100)
    found = rig.database.fetch_value(IN_PLACE)
    assert found != sorted(found)


def test_rows_that_stand_out_of_order_in_the_table_come_back_in_order(ready: SlotRig) -> None:
    stage_out_of_place(ready)
    ready.drop_slot()
    ready.init()
    ready.catch_up()
    numbers = [n for _, n in rows_of(ready.read())]
    assert numbers == list(range(300, 800))


def test_so_do_the_rows_of_a_shard(fresh: SlotRig) -> None:
    shard = ["--shard", "1/1"]
    fresh.init(*shard)
    stage_out_of_place(fresh)
    assert fresh.run("drop-slot", *shard, "--yes").returncode == 0
    fresh.init(*shard)
    fresh.catch_up(*shard)
    numbers = [n for _, n in rows_of(fresh.read())]
    assert numbers == list(range(300, 800))


@pytest.mark.parametrize("kind", ["uuid", "text"])
def test_ids_that_do_not_count_up_are_no_order_and_no_trouble(fresh: SlotRig, kind: str) -> None:
    fresh.alter(f"create table outbox (id {kind} primary key default gen_random_uuid(), task text, args jsonb)")
    fresh.init()
    rows = fresh.stage(count=50)
    fresh.drop_slot()
    fresh.init()
    fresh.catch_up()
    assert set(rows_of(fresh.read())) == set(rows)
