"""Whatever is wrong with the input: one line on stderr, the documented exit code, no password, nothing changed."""

import itertools
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from cdc_outbox.embedded import free_port
from tests.fix_command import Command
from tests.fix_postgres import Database, StartPostgres
from tests.fix_proxy import StartProxy
from tests.relay_rig import metrics_url, readiness
from tests.slot_rig import NewRig, SlotRig, refusal

MARKER = "pa55-marker"

# Options and words of the error line; nothing is connected to.
USAGE = {
    "an unknown option": (["stream", "--slto", "x"], ["No such option", "--slto"]),
    "an unknown command": (["strem"], ["no such command 'strem'", "stream"]),
    "no command": ([], ["Missing command"]),
    "an argument": (["stream", f"postgresql://u:{MARKER}@h/d"], ["--dsn"]),
    "an argument as command": ([f"postgresql://u:{MARKER}@h/d"], ["no such command"]),
    "a DSN in an unknown option": (["stream", f"--dns=postgresql://u:{MARKER}@h/d"], ["No such option", "--dns"]),
    "an option without a value": (["stream", "--slot"], ["--slot", "requires an argument"]),
    "a DSN nobody can parse": (["stream", "--dsn", f"host=x password={MARKER} nonsense"], ["DSN", "key=value"]),
    "a DSN with an unknown key": (["init-slot", "--dsn", f"postgresql://u:{MARKER}@h/d?sllmode=x"], ["DSN"]),
    "no broker": (["stream", "-b", ""], ["--bootstrap-servers"]),
    "a broker without a port": (["stream", "-b", "localhost:"], ["--bootstrap-servers", "HOST:PORT"]),
    "a broker with a bad port": (["stream", "-b", "one:9092,two:99999"], ["'two:99999'", "HOST:PORT"]),
    "a bad duration": (["init-slot", "--wait", "soon"], ["--wait", "'soon'", "10s"]),
    "a negative duration": (["stream", "--check-every=-1s"], ["--check-every", "'-1s'"]),
    "a duration of nothing": (["stream", "--shutdown-timeout", "0"], ["--shutdown-timeout", "above 0"]),
    "a purge of no rows": (["purge", "--purge-batch", "0"], ["--purge-batch"]),
    "a number that is none": (["purge", "--purge-batch", "many"], ["--purge-batch", "'many'"]),
    "a slot name": (["init-slot", "--slot", "My-Slot"], ["--slot", "'My-Slot'", "a-z"]),
    "a slot name that is too long": (["init-slot", "--slot", "s" * 64], ["--slot", "63"]),
    "a publication name that is too long": (["init-slot", "--publication", "ä" * 32], ["--publication", "63"]),
    "an empty table name": (["stream", "--table", ""], ["--table"]),
    "a topic name": (["stream", "--topic", "my topic"], ["--topic", "'my topic'"]),
    "a topic of an unclosed brace": (["stream", "--topic", "a{task"], ["--topic"]),
    "an endpos": (["stream", "--endpos", "12345"], ["--endpos", "'12345'"]),
    "two ends": (["stream", "--endpos", "0/1", "--until-caught-up"], ["--endpos", "--until-caught-up"]),
    "a metrics address": (["stream", "--metrics-address", "9187"], ["--metrics-address", "HOST:PORT"]),
    "a metrics port": (["stream", "--metrics-address", "127.0.0.1:99999"], ["--metrics-address", "65535"]),
    "a role of no column": (["stream", "--column", "argz=payload"], ["--column argz", "args"]),
    "a column without a name": (["stream", "--column", "args="], ["--column args"]),
    "a column without an equals sign": (["stream", "--column", "args"], ["--column", "NAME=VALUE"]),
    "a choice": (["stream", "--on-gap", "ignore"], ["--on-gap", "halt", "recover"]),
    "an -X name": (["stream", "-X", "linger.mss=5"], ["linger.mss"]),
    "an -X value": (["stream", "-X", "batch.size=soon"], ["batch.size"]),
    "an -X without a value": (["stream", "-X", f"sasl.password:{MARKER}"], ["sasl.password", "NAME=VALUE"]),
    "an -X twice": (["stream", "-X", "linger.ms=5", "-X", "linger.ms=6"], ["linger.ms", "twice"]),
    "acks=1": (["stream", "-X", "acks=1"], ["acks=1", "all"]),
    "acks under its other name": (["stream", "-X", "request.required.acks=0"], ["request.required.acks=0", "all"]),
    "no idempotence": (["stream", "-X", "enable.idempotence=false"], ["enable.idempotence=false", "reorder"]),
    "reports of errors only": (["stream", "-X", "delivery.report.only.error=true"], ["delivery.report.only.error"]),
    "Kafka's transactions": (["stream", "-X", "transactional.id=x"], ["transactional.id"]),
    "another partitioner": (["stream", "-X", "partitioner=random"], ["partitioner=random", "murmur2"]),
    "brokers by -X": (["stream", "-X", "bootstrap.servers=x:1"], ["bootstrap.servers", "--bootstrap-servers"]),
    "a second list of brokers": (["stream", "-X", "metadata.broker.list=x:1"], ["metadata.broker.list"]),
    "a callback": (["stream", "-X", "error_cb=x"], ["error_cb"]),
    "two problems": (["stream", "--slot", "A", "--endpos", "x", "-X", "acks=0"], ["--slot 'A'", "--endpos", "acks=0"]),
}


@pytest.mark.parametrize("case", USAGE)
def test_usage(command: Command, case: str) -> None:
    options, words = USAGE[case]
    bootstrap = ["-b", "127.0.0.1:1"] if options[:1] == ["stream"] and "-b" not in options else []
    done = command.run(*options[:1], *bootstrap, *options[1:], env={"PGHOST": "127.0.0.1", "PGPORT": "1"})
    refusal(done, 2, *words)
    assert MARKER not in done.stdout + done.stderr
    assert done.stdout == ""


CONFIGS = {
    "not TOML": (f"dsn = postgresql://u:{MARKER}@h/d", ["not valid TOML"]),
    "not UTF-8": ("slot = 'sch\udce4n'", ["not valid TOML"]),
    "an unknown key": (f"dns = 'postgresql://u:{MARKER}@h/d'", ["unknown key 'dns'"]),
    "two unknown keys": ("slott = 'x'\ntabel = 'y'", ["'slott'", "'tabel'"]),
    "a bad value": ("slot = 'A'", ["--slot 'A'"]),
    "a bad duration": ("purge-every = 'never'", ["--purge-every", "'never'"]),
    "an unsafe property": ("[property]\nacks = 1", ["acks=1"]),
    "a table for a plain option": ("[slot]\nname = 'x'", ["--slot"]),
    "a DSN nobody can parse": (f"dsn = 'password={MARKER} x'", ["DSN"]),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configuration_file(command: Command, tmp_path: Path, case: str) -> None:
    text, words = CONFIGS[case]
    path = tmp_path / "relay.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    done = command.run("stream", "-b", "127.0.0.1:1", "--config", path, env={"PGHOST": "127.0.0.1", "PGPORT": "1"})
    refusal(done, 2, *words)
    assert MARKER not in done.stdout + done.stderr


def test_a_missing_configuration_file(command: Command, tmp_path: Path) -> None:
    refusal(command.run("purge", "--config", tmp_path / "none.toml"), 2, "none.toml", "No such file")


def test_options_win_over_variables_over_the_file_over_defaults(
    database: Database, command: Command, tmp_path: Path
) -> None:
    """Seen in the SQL of a dry run."""
    path = tmp_path / "relay.toml"

    def slot(*options: str, file: str = "", **env: str) -> str:
        path.write_text(f"dsn = '{database.dsn}'\ntopic = 'of another command'\n{file}")
        done = command.run("init-slot", "--dry-run", "--config", path, *options, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.split("pg_create_logical_replication_slot('")[1].split("'")[0]

    assert slot() == "cdc_outbox"
    assert slot(file="slot = 'file'") == "file"
    assert slot(file="slot = 'file'", CDC_OUTBOX_SLOT="variable") == "variable"
    assert slot("--slot", "option", file="slot = 'file'", CDC_OUTBOX_SLOT="variable") == "option"


def test_where_the_dsn_comes_from(database: Database, command: Command, tmp_path: Path) -> None:
    nowhere = make_conninfo(host="127.0.0.1", port=1)
    path = tmp_path / "relay.toml"
    path.write_text(f"dsn = '{nowhere}'")
    run: list[object] = ["init-slot", "--dry-run"]
    found = {"CDC_OUTBOX_DSN": database.dsn, "DATABASE_URL": nowhere}
    assert command.run(*run, env=found).returncode == 0
    assert command.run(*run, "--config", path, env={"DATABASE_URL": database.dsn}).returncode == 0
    assert command.run(*run, "--dsn", database.dsn, env={"CDC_OUTBOX_DSN": nowhere}).returncode == 0
    server = {"PGHOST": "127.0.0.1", "PGPORT": str(database.server.port), "PGUSER": "postgres"}
    assert command.run(*run, env={**server, "PGDATABASE": database.name}).returncode == 0
    refusal(command.run(*run, "--config", path, env=server), 3, "Connection refused")


def test_every_key_of_the_file_is_an_options_name(ready: SlotRig, tmp_path: Path) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(
        f"dsn = '{ready.database.dsn}'\nslot = '{ready.slot}'\npublication = '{ready.publication}'\n"
        f"bootstrap-servers = '{ready.broker.bootstrap}'\ntopic = '{ready.topic}'\nformat = 'cloudevents'\n"
        "metrics_address = 'off'\npurge-every = 'off'\nuntil-caught-up = true\nshutdown-timeout = 5\njson = true\n"
        "[column]\nkey = 'id'\n[property]\n'linger.ms' = 0\n"
    )
    rows = ready.stage()
    done = ready.command.run("stream", "--config", path)
    assert done.returncode == 0, done.stderr
    (record,) = ready.read()
    assert record.headers["ce_type"] == b"mail"
    assert record.key == b"1"
    assert len(rows) == 1


# -- what is not there ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["init-slot", "drop-slot", "stream", "purge"])
def test_postgres_out_of_reach(ready: SlotRig, name: str) -> None:
    server = ready.database.server
    for dsn, word in (
        (f"postgresql://postgres:{MARKER}@127.0.0.1:{free_port()}/x", "Connection refused"),
        (f"postgresql://postgres:{MARKER}@nowhere.invalid:{server.port}/x", "nowhere.invalid"),
        (f"host=127.0.0.1 port={server.port} user=postgres dbname=nowhere password={MARKER}", '"nowhere" does not'),
        (f"host=127.0.0.1 port={server.port} user=nobody_here password={MARKER}", '"nobody_here" does not exist'),
    ):
        done = ready.run(name, "--dsn", dsn)
        refusal(done, 3, "connecting to Postgres", word)
        assert MARKER not in done.stdout + done.stderr


@pytest.mark.kafka_only  # tansu makes any topic that is asked for
def test_a_missing_topic(ready: SlotRig) -> None:
    """C43."""
    ready.broker.delete_topic(ready.topic)
    ready.stage()
    before = ready.state()
    ready.refused("stream", 3, f"topic {ready.topic}", "--topic")
    assert ready.state() == before


def test_a_metrics_port_in_use_costs_nothing(ready: SlotRig) -> None:
    """C57 (prometheus/client_python#667, google/turbinia#649)."""
    rows = ready.stage()
    before = ready.state()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        refusal(ready.run("stream", "--metrics-address", address), 2, address, "in use", "off")
    assert ready.state() == before
    relay = ready.stream()
    ready.wait_for(rows)
    address = metrics_url(relay).removeprefix("http://")
    refusal(ready.run("stream", "--metrics-address", address), 2, address, "in use")
    assert relay.running
    assert relay.terminate() == 0
    ready.catch_up("--metrics-address", address)


@pytest.mark.kafka_only
def test_kafka_away_at_the_start_is_waited_for(ready: SlotRig, proxy: StartProxy) -> None:
    """C41 (confluentinc/confluent-kafka-python#1091, confluentinc/librdkafka#1771)."""
    kafka = ready.broker.kafka
    away = ["--bootstrap-servers", kafka.proxied_bootstrap]
    rows = ready.stage(count=3)
    confirmed = ready.confirmed
    first = ready.stream(*away, "--shutdown-timeout", "1s")
    assert "Kafka does not answer yet" in first.stderr_text()
    relay = ready.start(*away)
    relay.wait_for_log("standby: ")
    assert first.terminate(8) == 0
    assert ready.confirmed == confirmed
    relay.wait_for_log("streaming ")
    rows += ready.stage(count=3)
    assert ready.confirmed == confirmed
    proxy(kafka.proxied_port, listen_port=kafka.proxy_port)
    assert len(ready.wait_for(rows)) == len(rows)
    ready.wait_until_confirmed(confirmed + 1)
    assert readiness(relay)[0] == 200
    assert relay.terminate() == 0


# -- passwords ------------------------------------------------------------------------------------------------------

Ways = dict[str, Callable[[str], tuple[list[str], dict[str, str]]]]


def password_ways(port: int, dbname: str, directory: Path) -> Ways:
    """How a password can be given: options and variables of it."""
    path = directory / "password.toml"

    def uri(password: str) -> str:
        return f"postgresql://postgres:{password}@127.0.0.1:{port}/{dbname}"

    def in_file(password: str) -> tuple[list[str], dict[str, str]]:
        path.write_text(f"dsn = '{uri(password)}'")
        return ["--config", str(path)], {}

    def key_value(password: str) -> tuple[list[str], dict[str, str]]:
        dsn = f"host = 127.0.0.1 port={port} user='postgres' dbname='{dbname}' password = '{password}'"
        return ["--dsn", dsn], {}

    server = {"PGHOST": "127.0.0.1", "PGPORT": str(port), "PGUSER": "postgres", "PGDATABASE": dbname}
    return {
        "URI": lambda password: (["--dsn", uri(password)], {}),
        "key=value": key_value,
        "variable": lambda password: ([], {"CDC_OUTBOX_DSN": uri(password)}),
        "PGPASSWORD": lambda password: ([], {**server, "PGPASSWORD": password}),
        "file": in_file,
    }


def test_a_password_is_used_and_never_shown(postgres_server: StartPostgres, new_rig: NewRig, tmp_path: Path) -> None:
    """C58 (reorg/pg_repack#285, powerdns/pdns#459)."""
    server = postgres_server()
    rig = new_rig(server)
    rig.init()
    rig.alter(f"alter role postgres password '{MARKER}'")
    hba = server.data_directory / "pg_hba.conf"
    hba.write_text("local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n")
    rig.alter("select pg_reload_conf()")
    names = ["--slot", rig.slot, "--publication", rig.publication]
    kafka = ["-b", rig.broker.bootstrap, "-t", rig.topic, "--metrics-address", "off", "--until-caught-up"]
    kafka += ["-X", "ssl.key.password=" + MARKER]
    commands: Iterator[list[str]] = itertools.cycle([["init-slot"], ["purge"], ["stream", *kafka], ["drop-slot"]])
    for give in password_ways(server.port, rig.database.name, tmp_path).values():
        options, env = give(f"wrong-{MARKER}")
        name, *more = next(commands)
        done = rig.command.run(name, *options, *names, *more, "--log-level", "debug", env=env)
        refusal(done, 3, "password authentication failed")
        assert MARKER not in done.stdout + done.stderr

        rows = rig.stage()
        options, env = give(MARKER)
        done = rig.command.run("stream", *options, *names, *kafka, "--log-level", "debug", env=env)
        assert done.returncode == 0, done.stderr
        rig.wait_for(rows)
        assert MARKER not in done.stdout + done.stderr
