"""Each state that an operator may find, produced for real: what `status`, `doctor`, `/readyz` and `/metrics` say."""

import math
import threading
from collections.abc import Callable

import psycopg
import pytest

from cdc_outbox.embedded import PostgresServer, ServerProcess
from cdc_outbox.slot_watch import CACHE_SECONDS
from tests.fix_command import Command
from tests.fix_kafka import Broker
from tests.fix_postgres import Database, StartPostgres
from tests.relay_rig import readiness
from tests.slot_rig import NewRig, NewRole, SlotRig, refusal
from tests.waiting import eventually
from tests.watched.rig import (
    SEGMENT,
    doctor,
    exporter,
    lose_slot,
    page,
    set_up,
    status,
    status_text,
    write_wal,
)
from tests.watched.servers import PgBouncer


def test_nothing_is_set_up(fresh: SlotRig) -> None:
    found = status(fresh)
    assert found.slot.state == "missing"
    assert found.outbox is found.lag.bytes is found.lag.seconds is None
    assert "init-slot" in status_text(fresh)
    report = doctor(fresh)
    assert report.verdicts("fail") == {"table", "publication", "slot"}
    assert all("init-slot" in report.findings[name].remedy for name in report.verdicts("fail"))
    report.expect("Kafka", "skip", "--bootstrap-servers")
    with exporter(fresh) as seen:
        assert seen.wal_status == "missing"
        assert seen.value("slot_active") == seen.value("slot_retained_wal_bytes") == 0
        assert seen.value("slot_safe_wal_bytes") == 0


def test_a_healthy_relay(ready: SlotRig) -> None:
    relay = ready.stream()
    seen = page(relay)
    rows = ready.stage(count=3)
    ready.wait_for(rows)
    eventually(lambda: seen.value("slot_lag_bytes") == 0, 30, "nothing is pending")
    assert readiness(relay) == (200, "ready\n")
    assert seen.wal_status == "reserved"
    assert seen.value("slot_active") == seen.value("streaming") == 1
    assert 0 < seen.value("slot_retained_wal_bytes") < SEGMENT
    assert seen.value("slot_safe_wal_bytes") == math.inf
    eventually(lambda: status(ready).lag.seconds == 0, 30, "no row waits any more")
    found = status(ready)
    assert (found.slot.state, found.slot.wal_status) == ("active", "reserved")
    assert found.slot.held_by.startswith(f"pid {found.slot.active_pid} (cdc-outbox, ")
    assert found.lag.bytes < SEGMENT
    assert found.outbox.rows == 3
    assert found.outbox.oldest_seconds > 0
    assert found.dead_letters.rows == 0
    assert (found.wal.left_bytes, found.wal.limit_bytes) == (None, None)
    assert found.unseen == []
    assert "next" not in status_text(ready)
    report = doctor(ready, kafka=True)
    assert not report.failed
    # One broker, and a session's server without a limit.
    assert report.verdicts("warn") == {"max_slot_wal_keep_size", "topic's copies"}
    report.expect("slot", "ok", "held by pid")


def test_rows_wait_while_no_relay_runs(ready: SlotRig) -> None:
    assert status(ready).lag.seconds == 0
    assert "no row waits" in status_text(ready)
    ready.stage(count=2)
    found = status(ready)
    assert found.slot.state == "inactive"
    assert found.lag.seconds > 0
    assert found.outbox.rows >= 1
    text = status_text(ready)
    assert "no relay reads it" in text
    assert "cdc-outbox stream" in text
    with exporter(ready) as seen:
        first = seen.value("oldest_unacked_seconds")
        assert first > 0
        assert seen.value("slot_lag_bytes") > 0
        eventually(lambda: seen.value("oldest_unacked_seconds") > first, 30, "the lag grows")
        assert seen.value("slot_active") == 0
    assert not doctor(ready).failed


@pytest.mark.kafka_only
def test_a_stalled_broker_and_then_a_lost_slot(
    private_broker: Broker,
    postgres_server: StartPostgres,
    new_database: Callable[[PostgresServer], Database],
    command: Command,
) -> None:
    server = postgres_server(max_slot_wal_keep_size="16MB", wal_sender_timeout="5s")
    rig = SlotRig(new_database(server), private_broker, command, private_broker.create_topic())
    set_up(rig)
    relay = rig.stream("--stalled-after", "1s")
    seen = page(relay)
    rig.wait_for(rig.stage())
    eventually(lambda: seen.value("slot_lag_bytes") == 0, 30, "nothing is pending")
    safe, retained = seen.value("slot_safe_wal_bytes"), seen.value("slot_retained_wal_bytes")
    assert 16 * 1024**2 <= safe < math.inf

    broker = private_broker.server
    assert isinstance(broker, ServerProcess)
    broker.pause()
    rig.stage(count=2)
    eventually(lambda: seen.value("in_flight_rows") == 2, 30, "the rows are in flight")
    eventually(lambda: readiness(relay)[1].startswith("stalled: nothing acknowledged"), 30, "readyz says so")
    assert readiness(relay)[0] == 503
    lag, behind = seen.value("oldest_unacked_seconds"), seen.value("slot_lag_bytes")
    write_wal(rig.database, 1)
    eventually(lambda: seen.value("slot_safe_wal_bytes") < safe, 30, "less WAL is left")
    assert seen.value("slot_retained_wal_bytes") > retained
    assert seen.value("slot_lag_bytes") > behind
    assert seen.value("oldest_unacked_seconds") > lag
    found = status(rig)
    assert found.slot.state == "active"
    assert found.lag.seconds > 0
    assert found.wal.limit_bytes == 16 * 1024**2
    assert 0 <= found.wal.left_bytes < safe
    assert found.wal.seconds_left > 0
    assert "before the slot is lost" in status_text(rig)
    report = doctor(rig, kafka=True)
    report.expect("Kafka", "fail", "no broker answers at", "--bootstrap-servers")
    report.expect("max_slot_wal_keep_size", "warn", "alter system set max_slot_wal_keep_size")
    assert report.verdicts("fail") == {"Kafka"}

    lose_slot(rig)
    assert relay.wait(30) == 4
    assert "init-slot" in relay.stderr_text().splitlines()[-1]
    found = status(rig)
    assert (found.slot.state, found.slot.invalidation_reason) == ("lost", "wal_removed")
    assert found.wal.left_bytes == 0
    assert found.lag.seconds > 0
    text = status_text(rig)
    assert "lost (wal_removed)" in text
    assert "init-slot" in text
    report = doctor(rig)
    assert report.verdicts("fail") == {"slot"}
    report.expect("slot", "fail", "lost", "init-slot")
    with exporter(rig) as after:
        assert after.wal_status == "lost"
        assert after.value("slot_safe_wal_bytes") == after.value("slot_active") == 0
        assert after.value("oldest_unacked_seconds") > 0


def test_an_idle_slot_that_the_server_took(
    postgres_server: StartPostgres, new_rig: NewRig, postgres_major: int
) -> None:
    if postgres_major < 18:
        pytest.skip("idle_replication_slot_timeout is of PostgreSQL 18")
    rig = new_rig(postgres_server(idle_replication_slot_timeout="2s"))
    set_up(rig)
    assert 0 <= status(rig).wal.idle_seconds_left <= 2
    assert "before idle_replication_slot_timeout takes the slot" in status_text(rig)

    def taken() -> bool:
        rig.database.execute("checkpoint")
        return bool(status(rig).slot.state == "lost")

    eventually(taken, 20, "the slot is taken")
    assert status(rig).slot.invalidation_reason == "idle_timeout"
    report = doctor(rig)
    assert report.verdicts("fail") == {"slot"}
    report.expect("slot", "fail", "lost (idle_timeout)", "init-slot")
    report.expect("idle_replication_slot_timeout", "warn", "alter system set idle_replication_slot_timeout = 0")
    with exporter(rig) as seen:
        assert seen.wal_status == "lost"


@pytest.mark.parametrize("kind", ["open", "prepared"])
def test_a_transaction_that_holds_the_slot_back(ready: SlotRig, kind: str) -> None:
    ready.alter("create table report (i int)")
    holder = ready.database.connect(autocommit=False, application_name="month end")
    holder.execute("insert into report values (1)")
    pid = holder.info.backend_pid
    gid = f"it's {ready.slot}"
    if kind == "prepared":
        holder.execute("select 1")
        holder.execute(psycopg.sql.SQL("prepare transaction {}").format(gid))
    relay = ready.stream()
    seen = page(relay)
    write_wal(ready.database, 5)

    def held() -> bool:
        ready.database.execute("checkpoint")  # which tells the slot's reader what is running
        ready.wait_for(ready.stage())
        return any(one.holds for one in status(ready).transactions)

    eventually(held, 20, "the transaction holds the slot back")
    one = status(ready).transactions[0]
    assert one.holds
    assert one.seconds > 0
    assert one.database == ready.database.name
    if kind == "open":
        assert (one.pid, one.application) == (pid, "month end")
        words = (f"pid {pid} (month end, ", f"select pg_terminate_backend({pid})")
    else:
        assert (one.pid, one.prepared) == (None, gid)
        words = (f"prepared transaction {gid}", "rollback prepared 'it''s ")
    assert words[0] in status_text(ready)
    report = doctor(ready)
    assert not report.failed
    report.expect("open transactions", "warn", *words)
    # WAL is held back, and yet no row waits.
    eventually(lambda: seen.value("slot_retained_wal_bytes") > 4 * SEGMENT, CACHE_SECONDS + 30, "WAL is held")
    eventually(lambda: seen.value("slot_lag_bytes") == 0, 30, "nothing is pending")
    assert readiness(relay) == (200, "ready\n")


def test_a_frozen_postgres(postgres_server: StartPostgres, new_rig: NewRig) -> None:
    server = postgres_server(wal_sender_timeout="4s")
    rig = new_rig(server)
    set_up(rig)
    relay = rig.stream()
    seen = page(relay)
    rig.wait_for(rig.stage())
    eventually(lambda: seen.value("slot_lag_bytes") == 0, 30, "nothing is pending")
    read_at = seen.value("slot_read_timestamp_seconds")
    server.pause()
    try:
        looking = [rig.command.start(name, *rig.names) for name in ("status", "doctor")]
        eventually(lambda: readiness(relay)[1].startswith("failed: no word from Postgres"), 30, "readyz says so")
        assert seen.value("slot_read_timestamp_seconds") >= read_at
        assert seen.value("slot_retained_wal_bytes") > 0  # what was known
        assert [one.wait(20) for one in looking] == [3, 3]
        assert "no answer within" in looking[0].stderr_text()
        assert looking[1].stdout_text().startswith("fail  Postgres: connecting to Postgres: no answer within")
        assert looking[1].stdout_text().count("fail ") == 1
    finally:
        server.resume()
    eventually(lambda: readiness(relay) == (200, "ready\n"), 30, "the relay streams again")
    eventually(lambda: seen.value("slot_active") == 1 and seen.value("slot_lag_bytes") == 0, 30, "and is up to date")
    assert seen.value("slot_read_timestamp_seconds") > read_at


def test_postgres_is_not_there(fresh: SlotRig) -> None:
    fresh.database.drop()
    refusal(fresh.run("status"), 3, "connecting to Postgres", "does not exist")
    report = doctor(fresh, kafka=True)
    assert report.verdicts("fail") == {"Postgres"}
    report.expect("Kafka", "ok")
    report.expect("largest row", "skip", "Postgres does not answer")


def test_wal_level_is_replica(postgres_server: StartPostgres, new_rig: NewRig) -> None:
    rig = new_rig(postgres_server(wal_level="replica"))
    assert status(rig).slot.state == "missing"
    doctor(rig).expect("wal_level", "fail", "replica", "alter system set wal_level = logical")


def test_all_slots_and_walsenders_are_in_use(postgres_server: StartPostgres, new_rig: NewRig) -> None:
    rig = new_rig(postgres_server(max_replication_slots=1, max_wal_senders=1))
    set_up(rig)
    doctor(rig).expect("replication slots", "ok", "1 of 1")
    rig.drop_slot()
    rig.alter("select pg_create_physical_replication_slot('taken')")
    with psycopg.connect(rig.database.server.dsn(rig.database.name, replication="database"), autocommit=True):
        report = doctor(rig)
    report.expect("replication slots", "fail", "all 1", "alter system set max_replication_slots = 6")
    report.expect("walsenders", "fail", "all 1", "alter system set max_wal_senders = 6")
    report.expect("replication privilege", "fail", "max_wal_senders")
    rig.alter("select pg_drop_replication_slot('taken')")


def test_a_role_without_rights(ready: SlotRig, new_role: NewRole) -> None:
    ready.stage(count=2)
    owner = status(ready)
    ready.user = role = new_role(ready)
    found = status(ready)
    assert vars(found.slot) | {"inactive_seconds": 0} == vars(owner.slot) | {"inactive_seconds": 0}
    assert found.lag.seconds is None
    assert [line.partition(":")[0] for line in found.unseen] == ["how long rows wait", "dead letters"]
    assert "not seen      how long rows wait: permission denied" in status_text(ready)
    report = doctor(ready)
    report.expect("replication privilege", "fail", f'alter role "{role}" replication')
    report.expect("privileges", "fail", "select on", "delete on", f'init-slot --relay-role "{role}"')
    assert report.verdicts("fail") == {"replication privilege", "privileges", "checkpoint guard"}
    with exporter(ready) as seen:
        assert seen.wal_status == "reserved"
        assert seen.value("oldest_unacked_seconds") == 0  # which rows wait it may not see


def test_a_role_that_may_not_even_see_the_schema(ready: SlotRig, new_role: NewRole) -> None:
    ready.alter("create schema hidden", "alter table outbox set schema hidden")
    ready.table = "hidden.outbox"
    ready.user = new_role(ready, "login replication")
    found = status(ready)
    assert found.slot.state == "inactive"
    assert "permission denied for schema hidden" in found.unseen[0]
    doctor(ready).expect("table", "fail", "permission denied for schema hidden")


@pytest.mark.parametrize("mode", ["session", "transaction"])
def test_a_pooler_in_between(ready: SlotRig, mode: str) -> None:
    ready.stage(count=2)
    with PgBouncer(ready.database.server, mode).start() as pooler:
        pooled = f"host=127.0.0.1 port={pooler.port} user=postgres dbname={ready.database.name}"
        found = status(ready, dsn=pooled)
        assert found.slot.state == "inactive"
        assert found.lag.seconds > 0
        report = doctor(ready, dsn=pooled)
        report.expect("pooler", "warn", "a pooler stands between", "connect directly")
        assert report.verdicts("fail") == {"replication privilege"}
        report.expect("replication privilege", "fail", "pooler")
        with exporter(ready, dsn=pooled) as seen:
            assert seen.wal_status == "reserved"
            assert seen.value("oldest_unacked_seconds") > 0
        # Whoever is given the server's session next finds it as it was.
        with psycopg.connect(pooled, autocommit=True) as next_client:
            limits = "select current_setting('statement_timeout'), current_setting('lock_timeout')"
            assert next_client.execute(limits).fetchone() == ("0", "0")


def test_the_relay_counts_as_a_synchronous_standby(postgres_server: StartPostgres, new_rig: NewRig) -> None:
    rig = new_rig(postgres_server())
    set_up(rig)
    relay = rig.stream("--stalled-after", "1s")
    seen = page(relay)
    rig.wait_for(rig.stage())
    rig.alter("alter system set synchronous_standby_names = '*'", "select pg_reload_conf()")
    writer = threading.Thread(target=rig.stage)
    try:
        eventually(lambda: rig.database.fetch_value("show synchronous_standby_names") == "*", 30, "the setting is read")
        report = doctor(rig)
        assert report.verdicts("fail") == {"synchronous_standby_names"}
        report.expect("synchronous_standby_names", "fail", "'*' counts the relay", "alter system set")
        writer.start()
        eventually(lambda: readiness(relay)[1].startswith("stalled: "), 20, "the relay waits for itself")
        assert seen.value("oldest_unacked_seconds") > 0.5
        assert seen.value("slot_lag_bytes") > 0
        assert seen.value("in_flight_rows") == 0
        report = doctor(rig, dsn=f"{rig.dsn} application_name=elsewhere")
        assert report.verdicts("fail") == {"synchronous_standby_names"}
    finally:
        rig.alter("alter system reset synchronous_standby_names", "select pg_reload_conf()")
    writer.join(20)
    eventually(lambda: readiness(relay) == (200, "ready\n"), 20, "the relay goes on")
    doctor(rig).expect("synchronous_standby_names", "ok", "none")
