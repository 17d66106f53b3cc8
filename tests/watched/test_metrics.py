"""`/metrics`: what Postgres says of the slot, asked when somebody scrapes; and a lag that is true of a dead stream."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from cdc_outbox.slot_watch import CACHE_SECONDS, Reading, SlotWatch
from tests.fix_command import get
from tests.fix_postgres import StartPostgres
from tests.relay_rig import metrics_url, readiness
from tests.slot_rig import NewRig, NewRole, SlotRig
from tests.waiting import eventually
from tests.watched.rig import SEGMENT, exporter, page, set_up, settings_of, write_wal

AT_ONCE_SECONDS = 1.5
"""What a scrape takes at most on a busy machine; much less than any timeout that it could run into."""

SESSIONS = """
select pid, state_change from pg_stat_activity
where application_name = %s and backend_type = 'client backend' order by backend_start"""


def test_nobody_scrapes_and_the_exporter_asks_nothing(ready: SlotRig) -> None:
    name = f"relay of {ready.slot}"
    relay = ready.stream("--dsn", f"{ready.dsn} application_name='{name}'")
    ready.wait_for(ready.stage())
    (own,) = ready.database.fetch(SESSIONS, (name,))
    page(relay)
    first, exporters = ready.database.fetch(SESSIONS, (name,))
    assert first[0] == own[0]
    ready.wait_for(ready.stage())  # the relay works on
    assert ready.database.fetch(SESSIONS, (name,))[1] == exporters
    deadline = time.monotonic() + CACHE_SECONDS
    eventually(lambda: time.monotonic() > deadline, CACHE_SECONDS + 30, "the reading is old")
    assert ready.database.fetch(SESSIONS, (name,))[1] == exporters
    get(f"{metrics_url(relay)}/healthz")
    get(f"{metrics_url(relay)}/readyz")
    assert ready.database.fetch(SESSIONS, (name,))[1] == exporters
    get(f"{metrics_url(relay)}/metrics")
    eventually(lambda: ready.database.fetch(SESSIONS, (name,))[1] > exporters, 30, "a scrape asks again")


def test_scrapes_at_the_same_time_share_one_reading(ready: SlotRig) -> None:
    watch = SlotWatch(settings_of(ready))
    try:
        first = eventually(watch.reading, 30, "a first reading")
        assert first is not None
        with ThreadPoolExecutor(20) as scrapes:
            assert set(scrapes.map(lambda _: watch.reading(), range(200))) == {first}

        def read_again() -> Reading | None:
            found = watch.reading()
            return found if found is not None and found.at > first.at else None

        second = eventually(read_again, CACHE_SECONDS + 30, "a second reading")
        assert second is not None
        assert second.at - first.at >= CACHE_SECONDS
    finally:
        watch.close()


def test_a_frozen_postgres_costs_each_scrape_next_to_nothing(postgres_server: StartPostgres, new_rig: NewRig) -> None:
    server = postgres_server()
    rig = new_rig(server)
    set_up(rig)
    with exporter(rig) as seen:
        known = seen.value("slot_retained_wal_bytes")
        server.pause()
        try:
            until = time.monotonic() + CACHE_SECONDS + 1
            longest, threads = 0.0, 0
            while time.monotonic() < until:
                start = time.monotonic()
                assert seen.value("slot_retained_wal_bytes") == known
                longest = max(longest, time.monotonic() - start)
                threads = max(threads, threading.active_count())
            assert longest < AT_ONCE_SECONDS
            assert threads < 10
        finally:
            server.resume()
        rig.stage()
        eventually(lambda: seen.value("slot_lag_bytes") > 0, 20, "the exporter goes on by itself")


def test_a_table_that_is_locked_costs_only_what_it_alone_can_tell(ready: SlotRig) -> None:
    ready.stage()
    with exporter(ready) as seen:
        lag = seen.value("oldest_unacked_seconds")
        assert lag > 0
        holder = ready.database.connect(autocommit=False)
        holder.execute("lock table outbox in access exclusive mode")
        read_at = seen.value("slot_read_timestamp_seconds")
        eventually(lambda: seen.value("slot_read_timestamp_seconds") > read_at, 30, "the slot is read again")
        assert seen.value("oldest_unacked_seconds") > lag
        waiting = "select count(*) from pg_locks where not granted"
        eventually(lambda: ready.database.fetch_value(waiting) == 0, 30, "no question of ours stays behind")


def test_an_exporter_whose_backend_is_terminated_connects_again(ready: SlotRig) -> None:
    name = f"exporter of {ready.slot}"
    with exporter(ready, dsn=f"{ready.dsn} application_name='{name}'") as seen:
        read_at = seen.value("slot_read_timestamp_seconds")
        end = "select count(pg_terminate_backend(pid, 5000)) from pg_stat_activity where application_name = %s"
        assert ready.database.fetch_value(end, (name,)) == 1
        eventually(lambda: seen.value("slot_read_timestamp_seconds") > read_at, 30, "it reads again")


def test_the_lag_grows_while_the_stream_is_dead_and_rows_come_in(ready: SlotRig, new_role: NewRole) -> None:
    role = new_role(ready, "login replication")
    set_up(ready, relay_role=role)
    ready.user = role
    relay = ready.stream()
    ready.wait_for(ready.stage())
    seen = page(relay)
    eventually(lambda: seen.value("slot_lag_bytes") == 0, 30, "nothing is pending")
    ready.alter(
        f"alter role {role} noreplication",
        f"select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = '{ready.slot}'",
    )
    eventually(lambda: readiness(relay)[1].startswith("failed: "), 30, "the stream is dead")
    assert (seen.value("slot_lag_bytes"), seen.value("oldest_unacked_seconds")) == (0, 0)
    rows = ready.stage(count=2)
    eventually(lambda: seen.value("oldest_unacked_seconds") > 0, CACHE_SECONDS + 30, "the rows are noticed")
    first = seen.value("oldest_unacked_seconds")
    assert first < 60
    assert seen.value("slot_lag_bytes") > 0
    eventually(lambda: seen.value("oldest_unacked_seconds") > first + 0.5, 30, "the lag grows")
    assert seen.value("slot_active") == seen.value("streaming") == 0
    ready.alter(f"alter role {role} replication")
    ready.wait_for(rows)
    eventually(lambda: seen.value("oldest_unacked_seconds") == 0, 30, "nothing is pending")
    eventually(lambda: seen.value("slot_active") == 1, CACHE_SECONDS + 30, "the slot is held")
    assert seen.value("slot_lag_bytes") == 0
    assert readiness(relay) == (200, "ready\n")


def test_a_standby_shows_how_the_slot_fares_under_another_relay(ready: SlotRig) -> None:
    active = ready.stream()
    standby = ready.start()
    eventually(lambda: readiness(standby)[1].startswith("standby: slot "), 30, "it stands by")
    status, why = readiness(standby)
    assert status == 503
    assert f"is held by pid {ready.database.fetch_value(HOLDER, (ready.slot,))} (cdc-outbox, " in why
    seen = page(standby)
    ready.wait_for(ready.stage())
    eventually(lambda: seen.value("slot_lag_bytes") == 0, CACHE_SECONDS + 30, "nothing is pending")
    assert (seen.value("streaming"), seen.value("slot_active")) == (0, 1)
    active.pause()
    rows = ready.stage(count=2)
    eventually(lambda: seen.value("oldest_unacked_seconds") > 0, CACHE_SECONDS + 30, "the rows are noticed")
    assert seen.value("slot_lag_bytes") > 0
    active.kill9()
    ready.wait_for(rows)
    eventually(lambda: readiness(standby) == (200, "ready\n"), 20, "the standby took over")
    eventually(lambda: seen.value("oldest_unacked_seconds") == 0, 30, "nothing is pending")


HOLDER = "select active_pid from pg_replication_slots where slot_name = %s"


def test_an_idle_relay_has_no_lag_whatever_else_is_written(ready: SlotRig) -> None:
    relay = ready.stream()
    ready.wait_for(ready.stage())
    seen = page(relay)
    eventually(lambda: seen.value("slot_lag_bytes") == 0, 30, "nothing is pending")
    read_at = seen.value("slot_read_timestamp_seconds")
    write_wal(ready.database, 2)

    def read_again() -> bool:
        assert (seen.value("slot_lag_bytes"), seen.value("oldest_unacked_seconds")) == (0, 0)
        return seen.value("slot_read_timestamp_seconds") > read_at

    eventually(read_again, CACHE_SECONDS + 30, "the slot is read again")
    eventually(lambda: seen.value("slot_retained_wal_bytes") < 2 * SEGMENT, 20, "the position follows")
