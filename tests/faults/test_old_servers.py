"""Servers before 15.13, 16.9 and 17.5 forget that a publication was mended: after a writer from before it, they decode
as if it had never been. The wheel with PostgreSQL 16 has such a server."""

import contextlib

import pytest

from cdc_outbox.embedded import postgres_bindir
from cdc_outbox.errors import PreconditionError
from cdc_outbox.setup import forgets_a_mended_publication
from tests.fix_postgres import StartPostgres
from tests.slot_rig import NewRig, SlotRig


@pytest.fixture
def old(postgres_server: StartPostgres, new_rig: NewRig) -> SlotRig:
    with contextlib.suppress(PreconditionError):
        postgres_bindir(16)
        rig = new_rig(postgres_server(major=16))
        if forgets_a_mended_publication(rig.database.fetch_value("select current_setting('server_version_num')::int")):
            rig.init()
            return rig
    pytest.skip("no server that is old enough")


@pytest.mark.parametrize("by_hand", [False, True])
def test_rows_arrive_after_a_publication_was_mended_beside_a_writer(old: SlotRig, by_hand: bool) -> None:
    """The publication lacks the table while the writer writes; it is mended, by hand or not, before the writer ends."""
    old.alter("alter publication {publication} drop table outbox")
    with contextlib.closing(old.database.connect(autocommit=False)) as spanning:
        rows = old.stage(on=spanning)
        if by_hand:
            old.alter("alter publication {publication} add table outbox")
            spanning.commit()
            old.init()
        else:
            init = old.start_init()
            init.wait_for_log("waiting for transactions that wrote to the outbox before: behind pid")
            spanning.commit()
            assert init.wait(60) == 0
    rows += old.stage(count=2)
    old.catch_up()
    old.wait_for(rows)


def test_which_servers_are_old() -> None:
    old = {150012, 160004, 160008, 170004}
    young = {150013, 160009, 170005, 170010, 180000, 190000}
    assert {version for version in old | young if forgets_a_mended_publication(version)} == old
