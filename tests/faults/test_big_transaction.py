"""One transaction as large as a table: memory stays bounded, and a crash in the middle repeats that one only."""

from pathlib import Path

import pytest

from tests.fix_command import Running
from tests.relay_rig import RelayRig, commit_lsn, metric, rows_of, standard_check
from tests.waiting import eventually

ROWS = 1_000_000
MOST_MEMORY = 200 * 2**20


def peak_memory(relay: Running) -> int:
    """Bytes, of proc(5)'s VmHWM."""
    status = Path(f"/proc/{relay.pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def copy_rows(rig: RelayRig, count: int) -> list[tuple[str, int]]:
    """In one COPY, which is one transaction."""
    rows = rig.next_rows("copied", count)
    with rig.database.connect().cursor().copy("copy outbox (task, args) from stdin") as copy:
        copy.write("".join(f'{task}\t{{"n": {n}}}\n' for task, n in rows))
    return rows


@pytest.mark.slow
def test_memory_is_bounded_whatever_one_transaction_holds_and_a_kill_repeats_only_it(rig: RelayRig) -> None:
    """C10 (supabase/realtime#125, eulerto/wal2json#178 and #272): kill -9 half way, and again from its beginning."""
    before = rig.stage(count=100)
    relay = rig.stream()
    rig.wait_until_confirmed(commit_lsn(rig.wait_for(before)[-1]))
    confirmed = rig.confirmed
    rows = copy_rows(rig, ROWS)
    after = rig.stage(count=10)
    eventually(lambda: sum(rig.ends().values()) > ROWS / 2, 120, "half of it is there")
    assert peak_memory(relay) < MOST_MEMORY
    relay.kill9()
    death = rig.death()
    assert confirmed <= death.confirmed_flush_lsn
    relay = rig.stream("--purge-every", "100ms")
    eventually(lambda: rig.backlog == 0, 240, "everything is relayed and purged")
    assert peak_memory(relay) < MOST_MEMORY
    assert metric(relay, "cdc_outbox_relayed_rows_total") == ROWS + len(after)
    assert relay.terminate() == 0
    records = rig.read(deadline=120)
    committed = [record for record in records if record.headers["task"] == b"copied"]
    assert death.confirmed_flush_lsn <= commit_lsn(committed[0])
    assert standard_check(before + rows + after, [], records) < ROWS
    assert rows_of(records[-len(after) :]) == after
