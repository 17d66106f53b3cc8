"""What the operator asked for: frozen, checked whole, all problems told at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Formatter

from cdc_outbox.errors import ConfigError
from cdc_outbox.event import CLOUDEVENTS_HEADERS, OWN_HEADERS, ROLES, RecordFormat, legal_topic, topic_columns
from cdc_outbox.lsn import parse_lsn

_IDENTIFIER = r'(?:[^\W\d][\w$]*|"(?:[^"]|"")+")'
TABLE_NAME = re.compile(rf"{_IDENTIFIER}(?:\.{_IDENTIFIER})?")
"""As in SQL; found again by `to_regclass` and `parse_ident`."""
SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}")
LONGEST_IDENTIFIER_BYTES = 63
LONGEST_SECONDS = 36_500 * 86_400.0
MOST_PURGED = 1_000_000
"""Rows in one DELETE: far more than is good, and still a number that Postgres counts with."""
_SHARD = re.compile(r"([0-9]{1,4})/([0-9]{1,4})")
MOST_SHARDS = 256
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|min|h|d)?")
_SERVER = re.compile(
    r"((?:sasl_)?(?:plaintext|ssl)://)?([\w.-]+|\[[0-9a-f:.]+(%\w+)?\])(?::(?P<port>[0-9]+))?", re.IGNORECASE
)
_URI_REFERENCE = re.compile(r"[!-~]+")


def seconds(text: str) -> float:
    """`500ms`, `10s`, `5m`, `7d`, or a bare number of seconds. Raises ValueError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration such as 500ms, 10s or 5m")
    found = float(match[1]) * _UNITS[match[2] or "s"]
    if found > LONGEST_SECONDS:
        raise ValueError("that is longer than a hundred years")
    return found


@dataclass(frozen=True, slots=True)
class Shard:
    """One slot of several that share an outbox (row_filter.py). The first of three is 1/3."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Raises ValueError."""
        match = _SHARD.fullmatch(text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]) <= MOST_SHARDS:
            raise ValueError(f"{text!r} is not a shard such as 1/3, of {MOST_SHARDS} at most")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def name(self, base: str) -> str:
        """Of its slot and of its publication. Another N has other names: two sets of shards can stand side by side."""
        return f"{base}_{self.number}_of_{self.count}"

    def siblings(self) -> list[Shard]:
        """All of its set, itself too."""
        return [Shard(number, self.count) for number in range(1, self.count + 1)]


@dataclass(frozen=True, slots=True)
class Settings:
    """Durations are seconds; WAL positions are text until they are used."""

    dsn: str = field(default="", repr=False)
    table: str = "outbox"
    slot: str = "cdc_outbox"
    publication: str = "cdc_outbox"
    shard: Shard | None = None
    """Slot and publication are already the shard's own."""
    bootstrap_servers: str = ""
    topic: str = "outbox"
    columns: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    cloudevents: bool = False
    source: str = "/cdc-outbox"
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    create_topics: bool = False
    topic_partitions: int = -1
    topic_replication: int = -1
    on_poison: str = "halt"
    on_gap: str = "halt"
    purge_every: float | None = 5.0
    purge_batch: int = 5000
    archive: bool = False
    archive_retain: float | None = None
    check_every: float = 60.0
    shutdown_timeout: float = 10.0
    no_wait: bool = False
    until_caught_up: bool = False
    endpos: str | None = None
    metrics_address: str | None = "127.0.0.1:9187"
    stalled_after: float = 30.0

    def record_format(self) -> RecordFormat:
        return RecordFormat(self.topic, self.columns, self.cloudevents, self.source, self.headers)


def check(settings: Settings, *, streaming: bool = False, producing: bool = False) -> None:
    """Raises ConfigError with every problem in it. `streaming`: the options of `stream` matter too; `producing`: those
    of them that say what a record is."""
    problems = list(_database_problems(settings))
    if streaming:
        problems += _stream_problems(settings)
    elif producing:
        problems += _record_problems(settings)
    if problems:
        raise ConfigError("; ".join(problems))


def _database_problems(settings: Settings) -> list[str]:
    problems = []
    if not SLOT_NAME.fullmatch(settings.slot):
        problems.append(f"--slot {settings.slot!r}: a slot's name has 1 to 63 of the characters a-z, 0-9 and _")
    for option, name in (("--publication", settings.publication), ("--table", settings.table)):
        if not name or "\0" in name:
            problems.append(f"{option}: a name is missing")
    if settings.table and not TABLE_NAME.fullmatch(settings.table):
        problems.append(f"--table {settings.table!r}: write NAME or SCHEMA.NAME, what is not plain in double quotes")
    if len(settings.publication.encode()) > LONGEST_IDENTIFIER_BYTES:
        problems.append(f"--publication: longer than {LONGEST_IDENTIFIER_BYTES} bytes")
    unknown = [role for role in settings.columns if role not in ROLES]
    problems += [f"--column {role}: no such role; there are {', '.join(ROLES)}" for role in unknown]
    problems += [f"--column {role}: a name is missing" for role, name in settings.columns.items() if not name]
    if settings.purge_every is not None and settings.purge_every <= 0:
        problems.append("--purge-every: give a duration above 0, or `off`")
    if not 0 < settings.purge_batch <= MOST_PURGED:
        problems.append(f"--purge-batch: give a number of rows, 1 to {MOST_PURGED:,}")
    if settings.archive_retain is not None and not settings.archive:
        problems.append("--archive-retain: it goes with --archive")
    return problems


def _record_problems(settings: Settings) -> list[str]:
    problems = _topic_problems(settings.topic)
    problems += [f"--header {name}: a column is missing" for name, column in settings.headers.items() if not column]
    own = OWN_HEADERS | (CLOUDEVENTS_HEADERS if settings.cloudevents else frozenset())
    problems += [f"--header {name}: the relay sets that one" for name in settings.headers if name in own]
    if settings.cloudevents and not _URI_REFERENCE.fullmatch(settings.source):
        problems.append(f"--source {settings.source!r}: write a URI or its end, such as /shop, without spaces")
    return problems


def _stream_problems(settings: Settings) -> list[str]:
    from cdc_outbox.kafka import unsafe_properties  # with librdkafka, which other commands do without

    problems = []
    if not settings.bootstrap_servers.strip():
        problems.append("--bootstrap-servers: no Kafka broker given (HOST:PORT[,HOST:PORT…])")
    else:
        problems += [
            f"--bootstrap-servers {server!r}: write HOST:PORT"
            for server in settings.bootstrap_servers.split(",")
            if not _legal_server(server.strip())
        ]
    problems += _record_problems(settings)
    for option, count, most in (
        ("partitions", settings.topic_partitions, 1_000_000),
        ("replication", settings.topic_replication, 32_767),
    ):
        if not (count == -1 or 0 < count <= most):
            problems.append(f"--topic-{option}: give a number of 1 to {most:,}, or -1 for the broker's default")
        elif count != -1 and not settings.create_topics:
            problems.append(f"--topic-{option}: it goes with --create-topics")
    problems += unsafe_properties(settings.properties)
    if settings.shutdown_timeout <= 0:
        problems.append("--shutdown-timeout: give a duration above 0")
    if settings.check_every <= 0:
        problems.append("--check-every: give a duration above 0")
    if settings.stalled_after <= 0:
        problems.append("--stalled-after: give a duration above 0")
    if settings.endpos is not None:
        try:
            parse_lsn(settings.endpos)
        except ValueError as error:
            problems.append(f"--endpos: {error}")
        if settings.until_caught_up:
            problems.append("--endpos and --until-caught-up: give one of them")
    if settings.metrics_address is not None:
        host, colon, port = settings.metrics_address.rpartition(":")
        if not (host.strip("[]") and colon and _is_port(port, least=0)) or re.search(r"\s", host):
            problems.append(
                f"--metrics-address {settings.metrics_address!r}: write HOST:PORT (port 0 to 65535), or `off`"
            )
    return problems


def _legal_server(server: str) -> bool:
    found = _SERVER.fullmatch(server)
    return found is not None and (found["port"] is None or _is_port(found["port"], least=1))


def _is_port(text: str, *, least: int) -> bool:
    return re.fullmatch(r"[0-9]{1,5}", text) is not None and least <= int(text) < 65536


def _topic_problems(topic: str) -> list[str]:
    try:
        topic_columns(topic)
    except ValueError as error:
        return [f"--topic {topic!r}: {error}"]
    # With a letter in every column's place: what is around the columns must be legal too.
    if not legal_topic("".join(before + ("x" if name else "") for before, name, _, _ in Formatter().parse(topic))):
        return [f"--topic {topic!r}: a topic's name has 1 to 249 of the characters a-z, A-Z, 0-9, . _ and -"]
    return []
