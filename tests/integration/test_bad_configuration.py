"""A configuration that makes no sense ends at once: exit 2, one line that names the option and says what to write
instead, and nothing is created anywhere: no table, slot or publication, no topic, no file.

In this process, so that a hundred of them take seconds; the same through the installed command at the end, and in
`test_bad_input.py`.
"""

import logging
import resource
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from cdc_outbox import logs
from cdc_outbox.cli import cli, main
from cdc_outbox.embedded import PostgresServer
from cdc_outbox.options import commands
from tests.fix_command import OURS, Command
from tests.fix_kafka import Broker
from tests.fix_postgres import Database
from tests.slot_rig import refusal

SECRET = "pa55word-marker"
COMMANDS = sorted(
    name for name, command in commands(cli).items() if any(parameter.name == "config" for parameter in command.params)
)
NEEDED = {
    "dead-letters retry": ["--all"],
    "dead-letters discard": ["--all"],
    "inbox-trim": ["--age", "1d"],
}
"""Without these a command complains of their absence first."""


@dataclass(frozen=True, slots=True)
class Bad:
    """A command line, variables and a configuration file; the words that the one line must have."""

    args: list[str]
    words: list[str]
    env: dict[str, str] = field(default_factory=dict)
    file: str | bytes | None = None


def stream(*args: str) -> list[str]:
    return ["stream", *args]


def on_the_command_line(args: list[str], *words: str) -> Bad:
    return Bad(args, list(words))


def in_a_variable(args: list[str], name: str, value: str, *words: str) -> Bad:
    return Bad(args, list(words), env={name: value})


def in_the_file(text: str | bytes, *words: str, args: list[str] | None = None) -> Bad:
    return Bad(args or stream(), list(words), file=text)


def dsn(text: str, *words: str) -> Bad:
    return Bad(["purge", "--dsn", text], ["--dsn", *words])


def property_(text: str, *words: str) -> Bad:
    return Bad(stream("-X", text), ["-X", *words])


CASES = {
    # -- names
    "slot A-b": on_the_command_line(stream("--slot", "A-b"), "--slot 'A-b'", "a-z"),
    "a slot with SQL in it": on_the_command_line(["drop-slot", "--slot", "x'; drop"], "--slot", "a-z"),
    "a table of nothing": on_the_command_line(["purge", "--table", ""], "--table", "missing"),
    "a publication too long": on_the_command_line(["init-slot", "--publication", "p" * 64], "--publication", "63"),
    "topic a b": on_the_command_line(stream("--topic", "a b"), "--topic 'a b'", "a-z"),
    "a topic of nothing": on_the_command_line(stream("--topic", ""), "--topic", "a-z"),
    "a topic too long": on_the_command_line(stream("--topic", "t" * 250), "--topic", "249"),
    "topic ..": on_the_command_line(stream("--topic", ".."), "--topic '..'"),
    "a topic with a format": on_the_command_line(stream("--topic", "jobs.{task!r}"), "--topic", "column's name"),
    "a topic with an open brace": on_the_command_line(stream("--topic", "jobs.{task"), "--topic"),
    "a scratch topic": on_the_command_line(["verify", "--scratch-topic", "a b"], "--scratch-topic 'a b'", "letters"),
    "a scratch topic with a column": on_the_command_line(["verify", "--scratch-topic", "{task}"], "--scratch-topic"),
    "no application's role": on_the_command_line(["init-slot", "--app-role", ""], "--app-role", "role's name"),
    "a relay's role too long": on_the_command_line(["init-slot", "--relay-role", "r" * 64], "--relay-role", "63"),
    "no inbox": on_the_command_line(["init-inbox", "--inbox", " "], "--inbox", "SCHEMA.NAME"),
    "an inbox that Inbox cannot name": on_the_command_line(
        ["inbox-trim", "--age", "1d", "--inbox", '"a""b"'], "--inbox", "SCHEMA.NAME"
    ),
    "a table and more": on_the_command_line(["purge", "--table", "a; drop table b"], "--table 'a; drop", "NAME"),
    "not UTF-8": on_the_command_line(["purge", "--table", "caf\udce9"], "--table", "UTF-8"),
    "a header's name that is not UTF-8": on_the_command_line(stream("--header", "\udce9=key"), "--header", "UTF-8"),
    # -- numbers and durations
    "a broker at port 0": on_the_command_line(stream("-b", "kafka:0"), "--bootstrap-servers 'kafka:0'", "HOST:PORT"),
    "a broker at port 70000": on_the_command_line(stream("-b", "kafka:70000"), "--bootstrap-servers", "HOST:PORT"),
    "a broker with a space": on_the_command_line(stream("-b", "kaf ka:9092"), "--bootstrap-servers", "HOST:PORT"),
    "a web address": on_the_command_line(stream("-b", "http://kafka:9092"), "--bootstrap-servers", "HOST:PORT"),
    "an IPv6 broker without brackets": on_the_command_line(stream("-b", "::1:9092"), "--bootstrap-servers"),
    "two brokers and a comma": on_the_command_line(stream("-b", "a:1,b:2,"), "--bootstrap-servers ''"),
    "no broker": on_the_command_line(["verify", "-b", ""], "--bootstrap-servers", "HOST:PORT"),
    "metrics at port 70000": on_the_command_line(stream("--metrics-address", "[::1]:70000"), "--metrics-address"),
    "metrics at no host": on_the_command_line(stream("--metrics-address", ":9187"), "--metrics-address", "HOST:PORT"),
    "a negative batch": on_the_command_line(["purge", "--purge-batch", "-1"], "--purge-batch", "1 to"),
    "a batch beyond counting": on_the_command_line(["purge", "--purge-batch", "9" * 12], "--purge-batch", "1,000,000"),
    "no partitions": on_the_command_line(stream("--create-topics", "--topic-partitions", "0"), "--topic-partitions"),
    "a duration without a number": on_the_command_line(["init-slot", "--wait", "soon"], "--wait", "'soon'", "10s"),
    "a duration beyond clocks": on_the_command_line(["init-slot", "--wait", "9" * 30], "--wait", "hundred years"),
    "rounds without a pause": on_the_command_line(["purge", "--every", "0s"], "--every", "above 0"),
    "looks without a pause": on_the_command_line(["status", "--watch", "0"], "--watch", "above 0"),
    "no time to check": on_the_command_line(stream("--check-every", "0"), "--check-every", "above 0"),
    "no time to stop": on_the_command_line(stream("--shutdown-timeout", "0s"), "--shutdown-timeout", "above 0"),
    "an archive of no time": on_the_command_line(["purge", "--archive", "--archive-retain", "0"], "--archive-retain"),
    "a moment": on_the_command_line(["replay", "--since", "yesterday"], "--since", "'yesterday'", "ISO 8601"),
    "a moment before time": on_the_command_line(["replay", "--until", "99999999d"], "--until", "ISO 8601"),
    "an age": on_the_command_line(["inbox-trim", "--age", "old"], "--age", "'old'", "10s"),
    "no age": on_the_command_line(["inbox-trim"], "--age", "Missing"),
    "a position": on_the_command_line(stream("--endpos", "0/G"), "--endpos", "'0/G'"),
    # -- choices and what goes together
    "a format": on_the_command_line(stream("--format", "avro"), "--format", "'avro'", "cloudevents"),
    "a log level": on_the_command_line(["status", "--log-level", "loud"], "--log-level", "'loud'", "debug"),
    "a gate": on_the_command_line(["verify", "--gate", "G10"], "--gate", "'G10'", "'G9'"),
    "a value for a switch": on_the_command_line(stream("--no-wait=yes"), "--no-wait", "does not take a value"),
    "two ends": on_the_command_line(stream("--until-caught-up", "--endpos", "0/1"), "--endpos", "--until-caught-up"),
    "a time of no archive": on_the_command_line(stream("--archive-retain", "7d"), "--archive-retain", "--archive"),
    "partitions of no topic": on_the_command_line(stream("--topic-partitions", "3"), "it goes with --create-topics"),
    "an end before the start": on_the_command_line(["replay", "--since", "1h", "--until", "2h"], "--since", "--until"),
    "some and all": on_the_command_line(["dead-letters", "discard", "--id", "1", "--all"], "--id", "--all"),
    "neither some nor all": on_the_command_line(["dead-letters", "retry"], "--id", "--all"),
    "half a command": on_the_command_line(["dead-letters"], "Missing command"),
    "an unknown option": on_the_command_line(stream("--slots", "x"), "--slots", "--slot"),
    "a role of no column": on_the_command_line(["replay", "--column", "argz=payload"], "--column argz", "args"),
    "a column twice": on_the_command_line(stream("--column", "args=a", "--column", "args=b"), "--column", "twice"),
    "a column of nothing": on_the_command_line(stream("--column", "args="), "--column args", "missing"),
    "a header that is ours": on_the_command_line(stream("--header", "commit_lsn=x"), "--header commit_lsn"),
    "a header of the binding": on_the_command_line(
        stream("--format", "cloudevents", "--header", "ce_id=x"), "--header ce_id", "sets that one"
    ),
    "a source with a space": on_the_command_line(
        stream("--format", "cloudevents", "--source", "my shop"), "--source 'my shop'", "URI"
    ),
    # -- properties of librdkafka
    "a property of nothing": property_("", "NAME=VALUE"),
    "a property without a name": property_("=5", "NAME=VALUE"),
    "a property without a value": property_(f"sasl.password:{SECRET}", "'sasl.password'", "NAME=VALUE"),
    "a property without a name that is a secret": property_(SECRET, "NAME=VALUE"),
    "an unknown property": property_("linger.mss=5", "linger.mss"),
    "an unknown compression": property_("compression.type=brotli", "brotli", "compression"),
    "an unknown protocol": property_("security.protocol=TLS", '"TLS"', "security.protocol"),
    "a unit in a value": property_("message.timeout.ms=30s", "message.timeout.ms=30s", "plain number"),
    "a hexadecimal limit": property_("message.max.bytes=0x100000", "message.max.bytes", "plain number"),
    "a power of ten": property_("batch.size=1e6", "batch.size=1e6", "plain number"),
    "a limit out of range": property_("queue.buffering.max.kbytes=0", "queue.buffering.max.kbytes", "range"),
    "no acknowledgements": property_("acks=0", "acks=0", "allowed: -1, all"),
    "no idempotence": property_("enable.idempotence=no", "enable.idempotence=no", "allowed"),
    "too many in flight": property_("max.in.flight=10", "max.in.flight", "<= 5"),
    "Java's settings": property_(f"sasl.jaas.config={SECRET}", "JAAS"),
    "properties of a topic": property_("default.topic.config=x", "default.topic.config", "themselves"),
    "a callback": property_("stats_cb=print", "stats_cb"),
    "an unreadable CA": property_("ssl.ca.location=/none/ca.pem", "ssl.ca.location=/none/ca.pem", "read"),
    "an unreadable certificate": property_("ssl.certificate.location=/none/c.pem", "ssl.certificate.location", "read"),
    "a CA that is none": Bad(stream("-X", "security.protocol=SSL", "-X", f"ssl.ca.pem={SECRET}"), ["-X", "ssl.ca.pem"]),
    "a mechanism that is none": Bad(
        stream("-X", "security.protocol=SASL_SSL", "-X", "sasl.mechanism=SCRAM"), ["-X", "mechanism: SCRAM"]
    ),
    "a mechanism without a password": Bad(
        stream("-X", "security.protocol=SASL_SSL", "-X", "sasl.mechanism=PLAIN"), ["-X", "sasl.password must be set"]
    ),
    # -- the DSN
    "a DSN that is none": dsn(f"host=x password={SECRET} nonsense", "parsed", "postgresql://"),
    "a key of no DSN": dsn(f"postgresql://u:{SECRET}@h/d?sllmode=require", "parsed", "key=value"),
    "a server at port 0": dsn("host=127.0.0.1 port=0", "port", "1 to 65535"),
    "a server at port 70000": dsn(f"host=127.0.0.1 port=70000 password={SECRET}", "port", "1 to 65535"),
    "more ports than hosts": dsn("host=one,two port=1,2,3", "3 ports for 2 hosts"),
    "a sslmode": dsn(f"host=127.0.0.1 port=1 sslmode=maybe password={SECRET}", "sslmode", '"maybe"'),
    "a forgotten quote": dsn(f"host=127.0.0.1 port=1 sslmode='require password={SECRET}'", "sslmode"),
    "a time-out": dsn("host=127.0.0.1 port=1 connect_timeout=soon", "connect_timeout", "whole number"),
    "a root certificate": dsn("host=127.0.0.1 port=1 sslmode=verify-full sslrootcert=/none/ca.pem", "/none/ca.pem"),
    "a client's key": dsn("host=127.0.0.1 port=1 sslmode=require sslkey=/none/key.pem", "sslkey", "read"),
    "a replication connection": dsn("host=127.0.0.1 port=1 replication=database", "replication", "relay to set"),
    # -- variables
    "a slot in a variable": in_a_variable(stream(), "CDC_OUTBOX_SLOT", "A-b", "--slot 'A-b'"),
    "a switch in a variable": in_a_variable(
        ["purge"], "CDC_OUTBOX_ARCHIVE", "maybe", "--archive", "CDC_OUTBOX_ARCHIVE"
    ),
    "a number in a variable": in_a_variable(["purge"], "CDC_OUTBOX_PURGE_BATCH", "many", "CDC_OUTBOX_PURGE_BATCH"),
    "a duration in a variable": in_a_variable(stream(), "CDC_OUTBOX_PURGE_EVERY", "never", "CDC_OUTBOX_PURGE_EVERY"),
    "a broker in a variable": in_a_variable(["verify"], "KAFKA_BOOTSTRAP_SERVERS", "k:x", "--bootstrap-servers"),
    "a secret in a variable": in_a_variable(stream(), "CDC_OUTBOX_PROPERTY", SECRET, "--property", "NAME=VALUE"),
    "a file in a variable": in_a_variable(["purge"], "CDC_OUTBOX_CONFIG", "/none.toml", "--config", "No such file"),
    "a DSN in a variable": in_a_variable(["purge"], "DATABASE_URL", f"password={SECRET} x", "--dsn", "parsed"),
    "libpq's port": in_a_variable(["purge", "--dsn", "host=127.0.0.1"], "PGPORT", "70000", "PGPORT", "65535"),
    "libpq's sslmode": in_a_variable(["purge", "--dsn", "host=127.0.0.1"], "PGSSLMODE", "maybe", "--dsn", "sslmode"),
    "libpq's service": in_a_variable(["purge", "--dsn", "dbname=x"], "PGSERVICE", "none", "--dsn", "service"),
    # -- the file
    "a directory as the file": on_the_command_line(["purge", "--config", "."], "--config .", "directory"),
    "no file": on_the_command_line(["purge", "--config", "none.toml"], "--config none.toml", "No such file"),
    "not TOML": in_the_file(f"dsn = {SECRET}", "--config", "TOML"),
    "not UTF-8 in the file": in_the_file(b'slot = "\xe9"', "--config", "TOML"),
    "an unknown key": in_the_file(f"dns = 'password={SECRET}'", "--config", "unknown key 'dns'"),
    "an unknown table": in_the_file("[kafka]\ntopic = 'x'", "--config", "unknown key 'kafka'"),
    "a key twice": in_the_file("purge-every = '1s'\npurge_every = '2s'", "--config", "purge_every", "twice"),
    "a slot of nothing": in_the_file("slot = ''", "--slot ''"),
    "half a row": in_the_file("purge-batch = 1.5", "--purge-batch", "'1.5'"),
    "yes for a number": in_the_file("purge-batch = true", "purge-batch", "no switch"),
    "yes for a name": in_the_file("topic = true", "topic", "no switch"),
    "a word for a switch": in_the_file("archive = 'yes'", "archive", "true or false"),
    "a number for a switch": in_the_file("no-wait = 1", "no-wait", "true or false"),
    "a list for a name": in_the_file("table = ['a', 'b']", "table", "one value"),
    "a table for a name": in_the_file("[slot]\nname = 'x'", "slot", "one value"),
    "a list of lists": in_the_file("property = [['acks', 'all']]", "property", "one value"),
    "a list in a table": in_the_file("[property]\n'linger.ms' = [5]", "property", "one value"),
    "no number": in_the_file("purge-every = nan", "--purge-every", "'nan'"),
    "a negative duration": in_the_file("check-every = -1", "--check-every", "'-1'"),
    "a zero character": in_the_file(f'dsn = "host=x password={SECRET}\\u0000"', "--dsn", "zero character"),
    "a header with a zero character": in_the_file('[header]\n"a\\u0000b" = "key"', "--header", "zero character"),
    "an unsafe property": in_the_file("property = 'acks=1'", "-X acks=1", "allowed"),
    "a switch turned off": in_the_file("[property]\n'enable.idempotence' = false", "-X enable.idempotence=false"),
}


@pytest.fixture(scope="module")
def database(postgres: PostgresServer) -> Iterator[Database]:
    """One for all: nothing is to be made in it."""
    made = Database(postgres, f"test_{secrets.token_hex(4)}")
    made.create()
    yield made
    made.drop()


@pytest.fixture(scope="module")
def admin(broker: Broker) -> AdminClient:
    return broker.admin


@pytest.fixture(scope="module")
def asking(database: Database) -> psycopg.Connection[Any]:
    return database.connect()


MADE = """
select (select count(*) from pg_class), (select count(*) from pg_publication), (select count(*) from pg_roles),
       (select count(*) from pg_replication_slots),
       (select count(*) from pg_stat_activity where application_name = 'cdc-outbox')"""


@pytest.fixture
def nothing_is_made(
    asking: psycopg.Connection[Any], admin: AdminClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Looks before and after; what is asked for would work with this server and this broker."""
    log = logging.getLogger("cdc_outbox")
    kept = log.handlers[:], log.level, log.propagate, threading.excepthook
    # No message may need it that an earlier case has told of the secret.
    monkeypatch.setattr(logs, "_secrets", set())
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)

    def made() -> object:
        return asking.execute(MADE).fetchall(), sorted(admin.list_topics(timeout=10).topics)

    before = made()
    yield
    assert made() == before
    assert list(empty.iterdir()) == []
    log.handlers[:], log.level, log.propagate, threading.excepthook = kept


def refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line."""
    before = time.process_time()
    with pytest.raises(SystemExit) as ended:
        main(args)
    seconds = time.process_time() - before
    out, err = capsys.readouterr()
    assert ended.value.code == 2, err
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("error: ")
    assert SECRET not in err
    assert seconds < 1
    return err


def bytes_of(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("nothing_is_made")
def test_what_makes_no_sense_is_refused_at_once(
    case: str,
    database: Database,
    broker: Broker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = CASES[case]
    name, *args = bad.args
    given = [name, *args]
    if name in ("stream", "verify") and "-b" not in args and "KAFKA_BOOTSTRAP_SERVERS" not in bad.env:
        given[1:1] = ["-b", broker.bootstrap]
    for variable in {*OURS, "PGPORT", "PGHOST"}:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CDC_OUTBOX_DSN", database.dsn)
    if "DATABASE_URL" in bad.env or (bad.file is not None and b"dsn" in bytes_of(bad.file)):
        monkeypatch.delenv("CDC_OUTBOX_DSN")
    for variable, value in bad.env.items():
        monkeypatch.setenv(variable, value)
    if bad.file is not None:
        path = tmp_path / "relay.toml"
        path.write_bytes(bytes_of(bad.file))
        given += ["--config", str(path)]
    line = refused(given, capsys)
    for word in bad.words:
        assert word in line


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.usefixtures("nothing_is_made")
def test_every_command_refuses_the_same(
    name: str, broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = NEEDED.get(name, [])
    if any("-b" in parameter.opts for parameter in commands(cli)[name].params):
        options = [*options, "-b", broker.bootstrap]
    path = tmp_path / "relay.toml"
    path.write_text(f"dns = 'password={SECRET}'")
    for more, word in (
        (["--slot", "A-b"], "--slot 'A-b'"),
        (["--publication", ""], "--publication"),
        (["--table", ""], "--table"),
        (["--dsn", f"password={SECRET} nonsense"], "--dsn"),
        (["--dsn", "host=127.0.0.1 port=70000"], "port"),
        (["--config", str(path)], "unknown key 'dns'"),
        (["--log-format", "xml"], "--log-format"),
        (["--nonsense"], "--nonsense"),
        ([f"postgresql://u:{SECRET}@h/d"], "--dsn"),
    ):
        assert word in refused([*name.split(), *options, *more], capsys)


def test_every_option_with_a_value_is_refused_when_its_value_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    for name, command in commands(cli).items():
        for parameter in command.params:
            # `--watch` alone is every two seconds.
            if isinstance(parameter, click.Option) and not parameter.is_flag and parameter.name != "watch":
                assert "requires an argument" in refused([*name.split(), parameter.opts[0]], capsys)


@pytest.mark.parametrize("case", ["slot A-b", "topic a b", "an unreadable CA", "a server at port 70000"])
def test_the_installed_command_says_the_same_within_a_second(command: Command, database: Database, case: str) -> None:
    """Of the processor's time: what else the machine does is not counted."""
    bad = CASES[case]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {"CDC_OUTBOX_DSN": database.dsn, "CDC_OUTBOX_BOOTSTRAP_SERVERS": "127.0.0.1:1"}
    refusal(command.run(*bad.args, env=env), 2, *bad.words)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
