import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_outbox.config import Settings, check, seconds
from cdc_outbox.errors import ConfigError

GOOD = Settings(bootstrap_servers="127.0.0.1:9092")

# (what is changed, the whole message)
DATABASE_PROBLEMS: list[tuple[dict[str, object], str]] = [
    ({"slot": "Big"}, "--slot 'Big': a slot's name has 1 to 63 of the characters a-z, 0-9 and _"),
    ({"slot": ""}, "--slot '': a slot's name has 1 to 63 of the characters a-z, 0-9 and _"),
    ({"slot": "a\n"}, r"--slot 'a\n': a slot's name has 1 to 63 of the characters a-z, 0-9 and _"),
    ({"publication": ""}, "--publication: a name is missing"),
    ({"publication": "a\0b"}, "--publication: a name is missing"),
    ({"publication": "ä" * 32}, "--publication: longer than 63 bytes"),
    ({"table": ""}, "--table: a name is missing"),
    ({"purge_every": 0.0}, "--purge-every: give a duration above 0, or `off`"),
    ({"purge_batch": 0}, "--purge-batch: give a number of rows, 1 to 1,000,000"),
    ({"purge_batch": 1_000_001}, "--purge-batch: give a number of rows, 1 to 1,000,000"),
    ({"archive_retain": 60.0}, "--archive-retain: it goes with --archive"),
    ({"columns": {"payload": "p"}}, "--column payload: no such role; there are id, task, args, key, headers"),
    ({"columns": {"args": ""}}, "--column args: a name is missing"),
]
NO_TABLES = ("a b", "1", "a.b.c", "a;", 'a"', '"a', '""', "a.", "a--", "(a)", " ", "a\n")
DATABASE_PROBLEMS += [
    ({"table": name}, f"--table {name!r}: write NAME or SCHEMA.NAME, what is not plain in double quotes")
    for name in NO_TABLES
]
STREAM_PROBLEMS: list[tuple[dict[str, object], str]] = [
    ({"bootstrap_servers": " "}, "--bootstrap-servers: no Kafka broker given (HOST:PORT[,HOST:PORT…])"),
    ({"bootstrap_servers": "a:9092,b:x"}, "--bootstrap-servers 'b:x': write HOST:PORT"),
    ({"bootstrap_servers": "a:9092,,b:1"}, "--bootstrap-servers '': write HOST:PORT"),
    ({"bootstrap_servers": "a:0"}, "--bootstrap-servers 'a:0': write HOST:PORT"),
    ({"bootstrap_servers": "a:65536"}, "--bootstrap-servers 'a:65536': write HOST:PORT"),
    ({"bootstrap_servers": "a:"}, "--bootstrap-servers 'a:': write HOST:PORT"),
    ({"bootstrap_servers": "a b:1"}, "--bootstrap-servers 'a b:1': write HOST:PORT"),
    ({"bootstrap_servers": "http://a:1"}, "--bootstrap-servers 'http://a:1': write HOST:PORT"),
    ({"bootstrap_servers": "::1:9092"}, "--bootstrap-servers '::1:9092': write HOST:PORT"),
    ({"bootstrap_servers": "a:\u0661"}, "--bootstrap-servers 'a:\u0661': write HOST:PORT"),
    (
        {"topic": "a b"},
        "--topic 'a b': a topic's name has 1 to 249 of the characters a-z, A-Z, 0-9, . _ and -",
    ),
    (
        {"topic": "jobs/{task}"},
        "--topic 'jobs/{task}': a topic's name has 1 to 249 of the characters a-z, A-Z, 0-9, . _ and -",
    ),
    (
        {"topic": "{{task}}"},
        "--topic '{{task}}': a topic's name has 1 to 249 of the characters a-z, A-Z, 0-9, . _ and -",
    ),
    ({"topic": "{}"}, "--topic '{}': a placeholder is a column's name in braces"),
    (
        {"properties": {"acks": "1"}},
        "-X acks=1: would break a promise (a row is purged once Kafka has it for good); allowed: -1, all",
    ),
    ({"headers": {"id": "n"}}, "--header id: the relay sets that one"),
    ({"headers": {"n": ""}}, "--header n: a column is missing"),
    ({"headers": {"ce_type": "n"}, "cloudevents": True}, "--header ce_type: the relay sets that one"),
    (
        {"source": "my shop", "cloudevents": True},
        "--source 'my shop': write a URI or its end, such as /shop, without spaces",
    ),
    ({"source": "", "cloudevents": True}, "--source '': write a URI or its end, such as /shop, without spaces"),
    (
        {"topic_partitions": 0},
        "--topic-partitions: give a number of 1 to 1,000,000, or -1 for the broker's default",
    ),
    ({"topic_partitions": 3}, "--topic-partitions: it goes with --create-topics"),
    (
        {"topic_replication": 70_000, "create_topics": True},
        "--topic-replication: give a number of 1 to 32,767, or -1 for the broker's default",
    ),
    ({"shutdown_timeout": 0.0}, "--shutdown-timeout: give a duration above 0"),
    ({"check_every": -1.0}, "--check-every: give a duration above 0"),
    ({"stalled_after": 0.0}, "--stalled-after: give a duration above 0"),
    ({"endpos": "x"}, "--endpos: not a WAL position: 'x'"),
    ({"endpos": "0/1", "until_caught_up": True}, "--endpos and --until-caught-up: give one of them"),
    ({"metrics_address": "9187"}, "--metrics-address '9187': write HOST:PORT (port 0 to 65535), or `off`"),
    ({"metrics_address": ":9187"}, "--metrics-address ':9187': write HOST:PORT (port 0 to 65535), or `off`"),
    ({"metrics_address": "a b:1"}, "--metrics-address 'a b:1': write HOST:PORT (port 0 to 65535), or `off`"),
    ({"metrics_address": "a:65536"}, "--metrics-address 'a:65536': write HOST:PORT (port 0 to 65535), or `off`"),
]


def changed(changes: dict[str, object]) -> Settings:
    return replace(GOOD, **changes)  # type: ignore[arg-type]  # a table of changes, of many types


@pytest.mark.parametrize(("changes", "message"), DATABASE_PROBLEMS + STREAM_PROBLEMS)
def test_each_problem_is_told_with_its_option(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(changed(changes), streaming=True)
    assert str(caught.value) == message
    assert message.startswith(("--", "-X "))


@pytest.mark.parametrize(("changes", "message"), DATABASE_PROBLEMS)
def test_what_concerns_the_database_is_checked_for_every_command(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(changed(changes))
    assert str(caught.value) == message


@pytest.mark.parametrize(("changes", "message"), STREAM_PROBLEMS)
def test_what_concerns_only_the_stream_does_not_stop_the_other_commands(
    changes: dict[str, object], message: str
) -> None:
    check(changed(changes))


def test_all_problems_are_told_at_once() -> None:
    bad = replace(
        GOOD, slot="A", table="", purge_batch=0, bootstrap_servers="", topic="?", properties={"acks": "0"}, endpos="?"
    )
    with pytest.raises(ConfigError) as caught:
        check(bad, streaming=True)
    told = [problem.split(":")[0].split(" ")[0] for problem in str(caught.value).split("; ") if problem[0] == "-"]
    assert told == ["--slot", "--table", "--purge-batch", "--bootstrap-servers", "--topic", "-X", "--endpos"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"slot": "a" * 63},
        {"publication": 'Größe "q"'},
        {"table": 'app."Out Box"'},
        {"table": '"a""b; --".größe$1'},
        {"bootstrap_servers": "kafka, b:9092 ,[::1]:9092,[::1]"},
        {"bootstrap_servers": "SSL://kafka-1.example:9093,sasl_ssl://b,gro\u00dfe:1,[fe80::1%eth0]:9092"},
        {"headers": {"ce_type": "kind", "type": "kind"}},
        {"source": "https://shop.example/a?b=c#d", "cloudevents": True},
        {"topic_partitions": 3, "create_topics": True},
        {"topic": "jobs.{task}"},
        {"topic": "{region}"},
        {"columns": {"args": "payload", "task": "type"}},
        {"properties": {"acks": "all", "linger.ms": "0"}},
        {"purge_every": None},
        {"endpos": "0/16B3748"},
        {"until_caught_up": True},
        {"metrics_address": None},
        {"metrics_address": "[::1]:0"},
        {"metrics_address": "0.0.0.0:65535"},
    ],
)
def test_good_settings_pass(changes: dict[str, object]) -> None:
    check(changed(changes), streaming=True)


def test_neither_dsn_nor_properties_are_shown_when_settings_are_printed() -> None:
    shown = repr(replace(GOOD, dsn="password=hunter2", properties={"sasl.password": "hunter2"}))
    assert "hunter2" not in shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500ms", 0.5),
        ("10s", 10.0),
        ("5m", 300.0),
        ("5min", 300.0),
        ("2h", 7200.0),
        ("7d", 604800.0),
        ("10", 10.0),
        ("1.5s", 1.5),
        (" 3 s ", 3.0),
        ("0", 0.0),
    ],
)
def test_a_duration_is_a_number_and_a_unit(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize(
    "text", ["", "s", "-1s", "1e3", "1.s", ".5s", "nan", "inf", "5 minutes", "1s2s", "1S", "\u0661s"]
)
def test_anything_else_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration such as 500ms, 10s or 5m"):
        seconds(text)


@pytest.mark.parametrize("text", ["36501d", "9" * 400, "1" + "0" * 300 + "h"])
def test_a_duration_that_no_clock_can_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="longer than a hundred years"):
        seconds(text)


@given(st.text(max_size=20))
def test_any_text_is_a_duration_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert seconds(text) >= 0


def test_the_record_format_is_made_of_the_settings() -> None:
    settings = replace(GOOD, topic="t", columns={"args": "payload"}, cloudevents=True, source="/shop")
    made = settings.record_format()
    assert (made.topic, made.cloudevents, made.source) == ("t", True, "/shop")
    assert (made.column("args"), made.column("task")) == ("payload", "task")
