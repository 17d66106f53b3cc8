"""One relay at a time per slot (G6): a second one waits, says for whom, and takes over."""

import time

from tests.relay_rig import Load, RelayRig, readiness, standard_check
from tests.waiting import eventually


def test_the_second_relay_takes_over_when_the_first_is_killed(rig: RelayRig) -> None:
    first = rig.stream()
    pid = rig.database.fetch_value("select active_pid from pg_replication_slots where slot_name = %s", (rig.slot,))
    second = rig.start()
    second.wait_for_log(f"standby: slot {rig.slot} is held by pid {pid} (cdc-outbox, 127.0.0.1, since ")
    assert readiness(second) == (503, "standby\n")
    assert readiness(first) == (200, "ready\n")

    with Load(rig, seed=6) as load:
        eventually(lambda: sum(rig.ends().values()) > 200, 20, "the first one relays")
        first.kill9()
        killed = time.monotonic()
        second.wait_for_log("streaming ", 10)
        taken = time.monotonic()
        end = sum(rig.ends().values())
        eventually(lambda: sum(rig.ends().values()) > end + 200, 20, "the second one relays")
    assert taken - killed < 5
    assert readiness(second) == (200, "ready\n")
    assert second.terminate() == 0
    rig.catch_up()
    standard_check(load.committed, load.rolled_back, rig.read())


def test_a_standby_takes_over_from_a_clean_stop_without_repeats(rig: RelayRig) -> None:
    first = rig.stream()
    second = rig.start()
    second.wait_for_log("standby: ")
    with Load(rig, seed=7) as load:
        eventually(lambda: sum(rig.ends().values()) > 200, 20, "the first one relays")
        assert first.terminate() == 0
        second.wait_for_log("streaming ", 10)
    assert second.terminate() == 0
    rig.catch_up()
    assert standard_check(load.committed, load.rolled_back, rig.read()) == 0


def test_a_standby_stops_at_once_when_it_is_asked_to(rig: RelayRig) -> None:
    rig.stream()
    second = rig.start()
    second.wait_for_log("standby: ")
    assert second.terminate(5) == 0


def test_no_wait_exits_6_and_says_who_holds_the_slot(rig: RelayRig) -> None:
    first = rig.stream()
    done = rig.command.run("stream", *rig.stream_options, "--no-wait")
    assert done.returncode == 6
    assert f"slot {rig.slot} is held by pid " in done.stderr
    assert "Traceback" not in done.stderr
    rows = rig.stage(count=3)
    rig.wait_for(rows)
    assert first.running
