"""A purge believes the slot at the end of its wait no more than at the beginning."""

from tests.slot_rig import SlotRig


def test_nothing_goes_when_the_slot_is_advanced_by_hand_while_a_purge_waits_for_it(ready: SlotRig) -> None:
    rows = ready.stage(count=10)
    listener = ready.database.connect()
    listener.execute(f'listen "{ready.slot}"'.encode())
    purge = ready.command.start("purge", *ready.names, "--every", "100ms")
    assert list(listener.notifies(timeout=20, stop_after=1)), "no purge asked for a position"
    ready.database.execute("select pg_replication_slot_advance(%s, pg_current_wal_lsn())", (ready.slot,))
    assert purge.wait() == 4
    assert "re-created or advanced by someone else" in purge.stderr_text()
    assert ready.backlog == len(rows)
