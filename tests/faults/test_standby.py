"""One relay at a time per slot (G6): a second one waits, says for whom, and takes over."""

import time

import pytest
from psycopg.conninfo import make_conninfo

from tests.fix_proxy import StartProxy
from tests.relay_rig import Load, RelayRig, commit_lsn, metric, readiness, rows_of, standard_check
from tests.waiting import eventually


def test_the_second_relay_takes_over_when_the_first_is_killed(rig: RelayRig) -> None:
    """C31a (risingwavelabs/risingwave#26075, eventuate-foundation/eventuate-cdc#142)."""
    first = rig.stream()
    pid = rig.database.fetch_value("select active_pid from pg_replication_slots where slot_name = %s", (rig.slot,))
    second = rig.start()
    second.wait_for_log(f"standby: slot {rig.slot} is held by pid {pid} (cdc-outbox, 127.0.0.1, since ")
    status, body = readiness(second)
    assert status == 503
    assert body.startswith(f"standby: slot {rig.slot} is held by pid {pid} ")
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


@pytest.mark.kafka_only
def test_a_relay_that_was_frozen_finds_another_in_its_place_and_stands_by(rig: RelayRig, proxy: StartProxy) -> None:
    """C31b (xtdb/xtdb#6076, EnterpriseDB/pg_failover_slots#46): SIGSTOP with rows in its producer's queue, takeover
    after wal_sender_timeout, SIGCONT. What was in that queue may then arrive once more, behind newer rows: a repeat
    that only its header `id` tells, since nothing fences a producer outside Kafka's transactions. It reads no more."""
    rig.database.execute(f"alter database {rig.database.name} set wal_sender_timeout = '2s'")
    kafka = rig.broker.kafka
    link = proxy(kafka.proxied_port, listen_port=kafka.proxy_port)
    first = rig.stream("--bootstrap-servers", kafka.proxied_bootstrap)
    second = rig.start()
    second.wait_for_log("standby: ")
    rows = rig.stage(count=20)
    rig.wait_until_confirmed(commit_lsn(rig.wait_for(rows)[-1]))
    link.stall()
    rows += rig.stage(count=5)
    eventually(lambda: metric(first, "cdc_outbox_in_flight_rows") == 5, 10, "rows are in its queue")
    first.pause()
    link.resume()
    rows += rig.stage(count=5)
    second.wait_for_log("streaming ", 15)
    rig.wait_for(rows)
    rows += rig.stage(count=5)
    first.resume()
    first.wait_for_log("standby: ", 15)
    rows += rig.stage(count=5)
    rig.wait_for(rows)
    assert readiness(first)[0] == 503
    assert readiness(second)[0] == 200
    assert [first.terminate(), second.terminate()] == [0, 0]
    records = rig.read()
    assert list(dict.fromkeys(rows_of(records))) == rows
    assert len(records) <= len(rows) + 5


def test_a_restart_right_after_a_kill_waits_for_what_is_left_of_the_first(rig: RelayRig, proxy: StartProxy) -> None:
    """C31c: its walsender still holds the slot, since nobody told the server that its client is gone."""
    rig.database.execute(f"alter database {rig.database.name} set wal_sender_timeout = '5s'")
    far = proxy(rig.database.server.port)
    first = rig.stream("--dsn", make_conninfo(rig.database.dsn, port=far.port))
    rows = rig.stage(count=5)
    rig.wait_for(rows)
    far.stall()
    first.kill9()
    second = rig.start()
    rows += rig.stage(count=5)
    second.wait_for_log("streaming ", 30)
    rig.wait_for(rows)
    assert second.terminate() == 0
    standard_check(rows, [], rig.read())
