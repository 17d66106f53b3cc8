"""Postgres behind TLS, certificates and SCRAM: every connection of the relay has the same settings, since libpq alone
reads them; what is wrong is one line; a password stands in none, wherever it came from."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cdc_outbox.embedded import PostgresServer
from tests.certificates import Authority, have_openssl
from tests.fix_command import get
from tests.fix_postgres import StartPostgres, major_with_tls
from tests.relay_rig import metrics_url
from tests.slot_rig import NewRig, SlotRig, refusal
from tests.waiting import eventually

ROLE = "relay"
PASSWORD = "Pa55-Marker %40'\\ä"
KEY_PASSWORD = "key-pa55-Marker"
HBA = """\
local    all all               trust
hostssl  all all 127.0.0.1/32  scram-sha-256  clientcert=verify-ca
"""


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    if not have_openssl():
        pytest.skip("`openssl` is not installed")
    return Authority(tmp_path / "authority")


@pytest.fixture
def secure(
    authority: Authority, postgres_major: int, postgres_server: StartPostgres, new_rig: NewRig
) -> tuple[SlotRig, dict[str, str]]:
    """An outbox on a server that wants a certificate and a password over TLS; the right parameters for it."""
    server = postgres_server(major=major_with_tls(postgres_major))
    rig = new_rig(server)
    rig.init()
    create = sql.SQL("create role {} login superuser password {}").format(sql.Identifier(ROLE), PASSWORD)
    with psycopg.connect(rig.database.socket_dsn, autocommit=True) as connection:
        connection.execute(create)
    server.stop()
    restrict(server, authority)
    server.start()
    own = authority.issue("client", password=KEY_PASSWORD)
    parameters = {
        "host": "127.0.0.1",
        "port": str(server.port),
        "dbname": rig.database.name,
        "user": ROLE,
        "password": PASSWORD,
        "sslmode": "verify-full",
        "sslrootcert": str(authority.certificate),
        "sslcert": str(own.certificate),
        "sslkey": str(own.key),
        "sslpassword": KEY_PASSWORD,
        "channel_binding": "require",
    }
    return rig, parameters


def restrict(server: PostgresServer, authority: Authority) -> None:
    own = authority.issue("server")
    directory = server.data_directory
    for source, name in ((own.certificate, "s.crt"), (own.key, "s.key"), (authority.certificate, "ca.crt")):
        target = directory / name
        shutil.copyfile(source, target)
        target.chmod(0o600)
        if server.account is not None:
            shutil.chown(target, server.account.uid, server.account.gid)
    (directory / "pg_hba.conf").write_text(HBA)
    server.settings |= {"ssl": "on", "ssl_cert_file": "s.crt", "ssl_key_file": "s.key", "ssl_ca_file": "ca.crt"}


def names(rig: SlotRig) -> list[str]:
    return ["--slot", rig.slot, "--publication", rig.publication]


def kafka(rig: SlotRig) -> list[str]:
    return ["-b", rig.broker.bootstrap, "-t", rig.topic, "--metrics-address", "127.0.0.1:0"]


CONNECTIONS = """
select count(*), count(distinct (ssl, version, cipher, client_dn)), bool_and(ssl), min(client_dn), min(usename)
from pg_stat_activity join pg_stat_ssl using (pid) where application_name = 'cdc-outbox'"""


def test_every_connection_of_the_relay_has_the_same_tls(secure: tuple[SlotRig, dict[str, str]]) -> None:
    rig, right = secure
    relay = rig.command.start(
        "stream", "--dsn", make_conninfo(**right), *names(rig), *kafka(rig), "--purge-every", "100ms"
    )
    rig.wait_for(rig.stage(count=3))
    eventually(lambda: rig.backlog == 0, 30, "the rows are purged")

    def connections() -> tuple[object, ...] | None:
        get(f"{metrics_url(relay)}/metrics")  # or the exporter has no reason to connect
        found: tuple[object, ...] = rig.database.fetch(CONNECTIONS)[0]
        return found if found[0] == 4 else None

    # The stream's, the questions', the purge's and the exporter's.
    assert eventually(connections, 20, "four connections") == (4, 1, True, "/CN=client", ROLE)
    assert relay.terminate() == 0
    for name in ("init-slot", "status", "purge"):
        done = rig.command.run(name, "--dsn", make_conninfo(**right), *names(rig))
        assert done.returncode == 0, done.stderr


def without(parameters: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in parameters.items() if name not in names}


def test_what_is_wrong_is_one_line_without_a_secret(secure: tuple[SlotRig, dict[str, str]], tmp_path: Path) -> None:
    rig, right = secure
    stranger = Authority(tmp_path / "stranger", "stranger")
    theirs = stranger.issue("client")
    plain = {"sslmode": "disable", "channel_binding": "disable"}
    for changes, words in (
        ({"password": f"no {PASSWORD}"}, ["password authentication failed"]),
        ({"user": "nobody"}, ["authentication failed"]),
        ({"sslrootcert": str(stranger.certificate)}, ["certificate verify failed"]),
        ({"host": "localhost", "hostaddr": "127.0.0.1"}, ["does not match host name"]),
        ({"sslcert": str(theirs.certificate), "sslkey": str(theirs.key)}, ["SSL error"]),
        ({"sslpassword": "no"}, ["private key"]),
        (plain, ["no pg_hba.conf entry", "no encryption"]),
    ):
        dsn = make_conninfo(**{**right, **changes})
        # The connection is the same code's for all; `stream` says it in front of Kafka.
        for name, more in (("stream", kafka(rig)), ("purge", []))[changes is not plain :]:
            done = rig.command.run(name, "--dsn", dsn, *names(rig), *more, "--log-level", "debug")
            line = refusal(done, 3, "connecting to Postgres", *words)
            assert not shows_a_secret(line + done.stderr + done.stdout)


def test_the_password_comes_from_wherever_libpq_takes_it(
    secure: tuple[SlotRig, dict[str, str]], tmp_path: Path
) -> None:
    rig, right = secure
    open_parameters = without(right, "password", "sslpassword")
    escaped = PASSWORD.replace("\\", "\\\\").replace(":", "\\:")
    passfile = tmp_path / "pgpass"
    passfile.write_text(f"127.0.0.1:*:*:{ROLE}:{escaped}\n")
    passfile.chmod(0o600)
    services = tmp_path / "services.conf"
    services.write_text("[relay]\n" + "".join(f"{name}={value}\n" for name, value in right.items()))
    unlocked = {**open_parameters, "sslpassword": KEY_PASSWORD}
    for dsn, env in (
        (make_conninfo(**unlocked), {"PGPASSWORD": PASSWORD}),
        (make_conninfo(**unlocked), {"PGPASSFILE": str(passfile)}),
        (make_conninfo(**unlocked, passfile=str(passfile)), {}),
        ("service=relay", {"PGSERVICEFILE": str(services)}),
        ("", {"PGSERVICEFILE": str(services), "PGSERVICE": "relay"}),
    ):
        rows = rig.stage()
        given = ["--dsn", dsn] if dsn else []
        more = ["--until-caught-up", "--log-level", "debug"]
        done = rig.command.run("stream", *given, *names(rig), *kafka(rig), *more, env=env)
        assert done.returncode == 0, done.stderr
        rig.wait_for(rows)
        assert not shows_a_secret(done.stdout + done.stderr)


def shows_a_secret(text: str) -> bool:
    return any(secret in text for secret in (PASSWORD, PASSWORD[:11], KEY_PASSWORD))
