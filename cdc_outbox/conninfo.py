"""The operator's DSN, for every connection alike. libpq parses it, nobody else; what it would find wrong with a value
once it connects is found before anything is connected to, or made.

No message quotes the DSN: libpq's own would quote a password.
"""

from __future__ import annotations

import os
import re

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc_outbox.errors import ConfigError, one_line
from cdc_outbox.logs import hide

CONNECT_SECONDS = 10.0
CONNECTION_DEFAULTS = {
    "application_name": "cdc-outbox",
    "connect_timeout": str(int(CONNECT_SECONDS)),
    # A dead peer is noticed within about 20 s, also when nothing is being sent (manual, 34.1.2).
    "keepalives_idle": "10",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
}

HINT = "write postgresql://USER@HOST:PORT/DATABASE, or key=value pairs; without, libpq's PG* variables count"
_NUMBERS = (
    *("connect_timeout", "tcp_user_timeout"),
    *("keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count"),
)
_SECRETS = ("password", "sslpassword")
_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
_NOWHERE = {"host": "/", "hostaddr": "", "port": "1"}
"""A directory without a socket: libpq looks at all its settings, and reaches nobody."""


def complete_conninfo(dsn: str) -> str:
    """`dsn` over our defaults. Raises ConfigError."""
    try:
        given = conninfo_to_dict(dsn)
        complete = make_conninfo(**{**CONNECTION_DEFAULTS, **given})  # type: ignore[arg-type]  # psycopg's own dict
    except psycopg.Error:
        raise ConfigError("--dsn: the DSN cannot be parsed", HINT) from None
    hide(os.environ.get("PGPASSWORD"), *(str(given[name]) for name in _SECRETS if given.get(name)))
    if problem := _problem({name: str(value) for name, value in given.items()}) or _refused(complete):
        raise ConfigError(f"--dsn: {problem}", HINT)
    return complete


def _problem(given: dict[str, str]) -> str | None:
    if given.get("replication"):
        return "replication is for the relay to set"
    for name in _NUMBERS:
        if name in given and not re.fullmatch(r"-?[0-9]{1,9}", given[name]):
            return f"{name} is not a whole number"
    ports = given.get("port", os.environ.get("PGPORT", "")).split(",")
    if any(port and not (re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536) for port in ports):
        return "port (or PGPORT) is not a number of 1 to 65535"
    hosts = max(len(given.get(name, "").split(",")) for name in ("host", "hostaddr"))
    if len(ports) not in (1, hosts):
        return f"{len(ports)} ports for {hosts} host{'s' if hosts > 1 else ''}"
    if given.get("sslmode") != "disable":
        for name in _FILES:
            path = given.get(name, "")
            # `system` is the trust store of the system, and an engine or a provider has a colon.
            if path not in ("", "system") and ":" not in path and not os.access(path, os.R_OK):
                return f"{name}: {path} cannot be read"
    return None


def _refused(conninfo: str) -> str | None:
    """What libpq has against a value, its own variables and services included."""
    nowhere = make_conninfo(conninfo, **_NOWHERE).encode()
    if pq.PGconn.ping(nowhere) != pq.Ping.NO_ATTEMPT:
        return None
    pgconn = pq.PGconn.connect_start(nowhere)
    said = one_line(pgconn.get_error_message())
    pgconn.finish()
    # A quote that was forgotten can make a password part of a value.
    return re.sub(r'"([^"]*)"', lambda found: '"…"' if re.search(r"[\s=]", found[1]) else found[0], said)
