"""Postgres restarted, cut off, behind TLS or a pooler, busy with others: the relay notices, says so, and comes back."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from cdc_outbox.embedded import PostgresServer
from cdc_outbox.lsn import WAL_SEGMENT_BYTES
from tests.fix_command import Running, scrape
from tests.fix_postgres import Database, StartPostgres, major_with_tls
from tests.fix_proxy import StartProxy
from tests.relay_rig import Load, RelayRig, commit_lsn, metrics_url, readiness, rows_of, standard_check
from tests.slot_rig import NewRig, SlotRig
from tests.waiting import eventually
from tests.watched.servers import PgBouncer

RESUMES_WITHIN = 10.0
BACKENDS = """
select pid, backend_start::text from pg_stat_activity
where application_name = 'cdc-outbox' and datname = current_database()"""


def is_read_by_metrics(relay: Running) -> float:
    """When Postgres last told the exporter of the slot."""
    samples = scrape(f"{metrics_url(relay)}/metrics")
    return next(value for name, value in samples.items() if name.startswith("cdc_outbox_slot_read_timestamp"))


# -- gone and back --------------------------------------------------------------------------------------------------


def test_the_end_of_any_one_of_its_backends_is_survived(rig: RelayRig) -> None:
    """C50 (Trendyol/go-pq-cdc#160 and #156, MaterializeInc/materialize#6898): the stream's, the questions', the
    purge's, the exporter's; each comes back within 10 s, under load."""
    relay = rig.stream("--purge-every", "100ms")

    def backends() -> set[tuple[int, str]]:
        is_read_by_metrics(relay)  # or there is nothing for the exporter to connect for
        found = set(rig.database.fetch(BACKENDS))
        return found if len(found) == 4 else set()

    with Load(rig, seed=50) as load:
        for pid, _ in eventually(backends, 20, "four backends"):
            rig.database.execute("select pg_terminate_backend(%s, 5000)", (pid,))
            terminated = time.monotonic()
            new = len(load.committed)
            eventually(lambda: len(load.committed) > new, 20, "a row is written")  # noqa: B023
            rig.wait_for(load.committed[new : new + 1])
            assert time.monotonic() - terminated < RESUMES_WITHIN
            eventually(backends, 20, "four backends again")
    eventually(lambda: rig.backlog == 0, 30, "everything is relayed and purged")
    asked = time.time()
    eventually(lambda: is_read_by_metrics(relay) > asked, 10, "the exporter asks again")
    assert relay.terminate() == 0
    standard_check(load.committed, load.rolled_back, rig.read())


@pytest.mark.parametrize("how", ["fast", "immediate", "kill -9"])
def test_streaming_resumes_after_any_kind_of_restart(postgres_server: StartPostgres, new_rig: NewRig, how: str) -> None:
    """C50: with thousands of rows on their way; purge and metrics recover too, and a purge run apart."""
    server = postgres_server()
    rig = new_rig(server)
    rig.init()
    relay = rig.stream("--purge-every", "100ms")
    purge = rig.command.start("purge", *rig.names, "--every", "100ms")
    rig.wait_for(rig.stage("first"))
    eventually(lambda: "rows purged" in purge.stdout_text(), 30, "the purge run apart is at work")
    is_read_by_metrics(relay)
    rows = rig.stage(count=5000)
    if how == "kill -9":
        server.kill9()
    else:
        server.stop(how)
    relay.wait_for_log("starting over")
    assert readiness(relay)[0] == 503
    assert scrape(f"{metrics_url(relay)}/metrics")
    server.start()
    started = time.monotonic()
    rows += rig.stage()
    rig.wait_for(rows[-1:], RESUMES_WITHIN)
    assert time.monotonic() - started < RESUMES_WITHIN
    rows += rig.stage(count=10)
    eventually(lambda: rig.backlog == 0, 30, "everything is relayed and purged")
    eventually(lambda: is_read_by_metrics(relay) > time.time() - 5, 15, "the exporter asks again")
    assert readiness(relay)[0] == 200
    assert purge.running, purge.stderr_text()
    assert purge.terminate() == 0, purge.stderr_text()
    assert relay.terminate() == 0
    records = [record for record in rig.read() if record.headers["task"] == b"mail"]
    standard_check(rows, [], records)


def test_a_database_that_is_read_only_for_a_while_is_waited_for(rig: RelayRig) -> None:
    """C50, the kind of it: in a failover, or in an hour of maintenance, nothing can be stored. Rows go on, what they
    are confirmed by waits, and neither the relay nor a purge run apart ends."""
    relay = rig.stream("--purge-every", "100ms")
    purge = rig.command.start("purge", *rig.names, "--every", "100ms")
    eventually(lambda: "rows purged" in purge.stdout_text(), 30, "the purge run apart is at work")
    rows = rig.stage(count=3)
    rig.wait_until_confirmed(commit_lsn(rig.wait_for(rows)[-1]))
    end_all = f"select pg_terminate_backend(pid) from ({BACKENDS}) b"
    rig.database.execute(f"alter database {rig.database.name} set default_transaction_read_only = on")
    rig.database.execute(end_all)
    writer = rig.database.connect(options="-c default_transaction_read_only=off")
    rows += rig.stage(count=3, on=writer)
    relay.wait_for_log("(25006); starting over")
    confirmed = rig.confirmed
    rig.wait_for(rows)
    assert rig.confirmed == confirmed
    assert rig.backlog >= 3
    writer.execute(f"alter database {rig.database.name} reset default_transaction_read_only".encode())
    rig.database.execute(end_all)
    eventually(lambda: rig.backlog == 0, 30, "everything is relayed and purged")
    assert purge.terminate() == 0
    assert relay.terminate() == 0
    standard_check(rows, [], rig.read())


# -- half-open ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["both", "to_client"])
def test_a_half_open_connection_is_noticed_within_two_status_intervals(
    ready: SlotRig, proxy: StartProxy, direction: str
) -> None:
    """Nothing comes from the server, not even an end: with wal_sender_timeout = 4 s a status update goes out, and an
    answer is due, each second."""
    ready.alter(f"alter database \"{ready.database.name}\" set wal_sender_timeout = '4s'")
    far = proxy(ready.database.server.port)
    relay = ready.stream("--dsn", make_conninfo(ready.dsn, port=far.port))
    rows = ready.stage(count=3)
    ready.wait_for(rows)
    far.stall(direction)  # type: ignore[arg-type]  # one of its directions
    stalled = time.monotonic()
    relay.wait_for_log("no word from Postgres", 10)
    assert time.monotonic() - stalled < 2 * 1.0 + 1.5
    rows += ready.stage(count=3)
    far.resume()
    resumed = time.monotonic()
    ready.wait_for(rows, RESUMES_WITHIN)
    assert time.monotonic() - resumed < RESUMES_WITHIN
    assert relay.terminate() == 0
    assert standard_check(rows, [], ready.read()) <= 3


# -- TLS ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tls_server(postgres_major: int, postgres_server: StartPostgres) -> PostgresServer:
    """With a self-signed certificate; of a major that knows TLS (some wheels do not)."""
    if not shutil.which("openssl"):
        pytest.skip("`openssl` is not installed")
    server = postgres_server(major=major_with_tls(postgres_major))
    server.stop()
    for path in self_signed(server.data_directory, "localhost"):
        path.chmod(0o600)
        if server.account is not None:
            shutil.chown(path, server.account.uid, server.account.gid)
    server.settings["ssl"] = "on"
    return server.start()


def self_signed(directory: Path, name: str) -> list[Path]:
    """Certificate and key."""
    certificate, key = (directory / f"server.{end}" for end in ("crt", "key"))
    args = ["openssl", "req", "-new", "-x509", "-nodes", "-newkey", "rsa:2048", "-subj", f"/CN={name}", "-days", "2"]
    subprocess.run([*args, "-out", str(certificate), "-keyout", str(key)], check=True, capture_output=True)
    return [certificate, key]


class TlsRig(SlotRig):
    sslrootcert = ""

    @property
    def dsn(self) -> str:
        trust = (
            {"sslmode": "verify-ca", "sslrootcert": self.sslrootcert} if self.sslrootcert else {"sslmode": "require"}
        )
        return make_conninfo(super().dsn, **trust)


@pytest.fixture
def tls_rig(tls_server: PostgresServer, new_rig: NewRig) -> TlsRig:
    plain = new_rig(tls_server)
    rig = TlsRig(plain.database, plain.broker, plain.command, plain.topic)
    rig.init()
    return rig


@pytest.mark.kafka_only  # tansu tells a wrong end of a partition
def test_over_tls_no_row_waits_for_the_next_one_whatever_its_size(tls_rig: TlsRig) -> None:
    """A TLS record holds decrypted bytes that poll(2) does not see: each row comes alone, and the server has nothing
    more to say for 10 s."""
    rig = tls_rig
    relay = rig.stream("-X", "message.max.bytes=5000000", "-X", "linger.ms=0")
    encrypted = "select bool_and(ssl) from pg_stat_ssl join pg_stat_activity using (pid) where application_name = %s"
    assert rig.database.fetch_value(encrypted, ("cdc-outbox",))
    rows = rig.stage()
    sizes = [*range(7_900, 8_300, 80), *range(16_000, 17_000, 90), *range(30_000, 300_000, 11_111), 900_000]
    longest = 0.0
    for size in sizes:
        staged = rig.stage(padding=size)
        since = time.monotonic()
        eventually(lambda: sum(rig.ends().values()) > len(rows), 9, f"a row of {size} bytes")  # noqa: B023
        longest = max(longest, time.monotonic() - since)
        rows += staged
    assert longest < 5
    assert relay.terminate() == 0
    assert standard_check(rows, [], rig.read()) == 0


def test_over_tls_a_load_of_large_rows_arrives_and_is_purged(tls_rig: TlsRig) -> None:
    """The purge's answers are long too."""
    rig = tls_rig
    rows = []
    for size in (100, 5_000, 20_000, 70_000):
        rows += rig.stage(count=100, padding=size)
    rows += rig.stage(count=30_000)
    relay = rig.stream("--purge-every", "100ms")
    eventually(lambda: rig.backlog == 0, 25, "everything is relayed and purged")
    assert "no answer" not in relay.stderr_text()
    assert relay.terminate() == 0
    assert standard_check(rows, [], rig.read()) == 0


def test_a_certificate_that_is_not_trusted_is_one_line_on_every_connection(tls_rig: TlsRig, tmp_path: Path) -> None:
    """libpq parses the settings, once for all connections."""
    other, _ = self_signed(tmp_path, "other")
    tls_rig.stage()
    tls_rig.sslrootcert = str(other)
    for name in ("stream", "purge", "init-slot"):
        tls_rig.refused(name, 3, "certificate verify failed")
    tls_rig.sslrootcert = str(tls_rig.database.server.data_directory / "server.crt")
    tls_rig.catch_up()
    assert len(tls_rig.read()) == 1


# -- beside others --------------------------------------------------------------------------------------------------


def test_an_idle_outbox_beside_busy_neighbours_holds_back_no_more_than_a_segment(
    rig: RelayRig, database: Database
) -> None:
    """C01 (alias2k/flusso#111, readysettech/readyset#263, npgsql/npgsql#6143): WAL of another database and of another
    table; with nothing in flight the position follows the keepalives, and a quiet cluster stays quiet."""
    relay = rig.stream()
    rig.wait_until_confirmed(commit_lsn(rig.wait_for(rig.stage())[0]))
    start = rig.confirmed
    write = "create table busy as select n, repeat(md5(n::text), 30) as t from generate_series(1, 30000) n"
    neighbour = Database(database.server, f"{database.name}_busy")
    neighbour.create()
    try:
        for busy in (neighbour, database):
            before = rig.wal_position
            busy.execute(write)
            end = rig.wal_position
            assert end - before > 1.5 * WAL_SEGMENT_BYTES
            rig.wait_until_confirmed(end - WAL_SEGMENT_BYTES)
            busy.execute("drop table busy")
    finally:
        neighbour.drop()
    assert rig.confirmed > start
    database.execute("checkpoint")
    stored = "select stored_at::text, position::text from outbox_checkpoint"
    eventually(lambda: rig.confirmed + WAL_SEGMENT_BYTES > rig.wal_position, 20, "it has come near")
    before_rest = database.fetch(stored)
    # Nothing is written for what is less than a segment.
    database.execute("create table little as select 1")
    assert rig.read()
    assert database.fetch(stored) == before_rest
    assert relay.terminate() == 0


@pytest.mark.parametrize("mode", ["session", "transaction"])
def test_a_pooler_cannot_carry_the_stream_and_is_named(ready: SlotRig, mode: str) -> None:
    """C60 (pgbouncer/pgbouncer#382, neondatabase/neon#6291): one clear line for the stream; a purge works through it,
    and leaves the server's session as it was."""
    relay = ready.stream()
    rows = ready.stage(count=5)
    ready.wait_for(rows)
    with PgBouncer(ready.database.server, mode).start() as pooler:
        pooled = f"host=127.0.0.1 port={pooler.port} user=postgres dbname={ready.database.name}"
        done = ready.run("stream", "--dsn", pooled, "--no-wait")
        assert done.returncode == 3
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
        assert "pooler" in line
        assert "Traceback" not in done.stderr
        purged = ready.run("purge", "--dsn", pooled)
        assert purged.returncode == 0, purged.stderr
        assert "5 rows purged" in purged.stdout
    assert relay.terminate() == 0
    assert rows_of(ready.read()) == rows
