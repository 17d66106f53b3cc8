"""Every way in which this program ends or starts over, with its exit code and what the operator does next.

One decision per class: `retry` says whether a running relay rebuilds itself from the slot (crash-only, one
recovery path) or stops with `exit_code`. Code elsewhere raises; only the relay's top and the command line catch.
"""

from __future__ import annotations

from typing import ClassVar


class OutboxError(Exception):
    """Something went wrong that this program knows by name."""

    exit_code: ClassVar[int] = 1
    retry: ClassVar[bool] = False

    def __init__(self, message: str = "", hint: str = "") -> None:
        super().__init__(one_line(message) or one_line(self.__class__.__doc__ or ""))
        self.hint = one_line(hint)


class ConfigError(OutboxError):
    """An option, variable or key of the configuration file is wrong."""

    exit_code = 2


class PreconditionError(OutboxError):
    """Something outside this program is not set up: a server setting, a privilege, a table, a topic."""

    exit_code = 3


class GapError(OutboxError):
    """The slot is missing, lost, or was moved by someone else: rows may be missing from the stream."""

    exit_code = 4


class RecordRefused(OutboxError):
    """Kafka will never take this record, whatever the time or place."""

    exit_code = 5


class SlotInUse(OutboxError):
    """Another relay holds the slot."""

    exit_code = 6
    retry = True


class ProtocolError(OutboxError):
    """Postgres sent bytes that are not what its manual says; nothing is skipped, so the relay stops."""


class ConnectionLost(OutboxError):
    """The connection to Postgres broke or could not be made."""

    retry = True
    exit_code = 3


class DeliveryFailed(OutboxError):
    """Kafka did not take a record this time; it is sent again from the slot."""

    retry = True


class BatchRefused(DeliveryFailed):
    """Kafka refused a batch for good: for its size, or for one of its records."""

    def __init__(self, final_lsn: int, topic: str, message: str) -> None:
        """`final_lsn`: of the transaction whose row it was."""
        super().__init__(f"topic {topic}: Kafka refused a batch: {message}")
        self.final_lsn = final_lsn
        self.topic = topic


class TopicMissing(DeliveryFailed):
    """A topic does not exist (yet)."""

    def __init__(self, topics: set[str], message: str) -> None:
        """`topics`: all that are missing, which delivery reports may still add to."""
        super().__init__(message)
        self.topics = topics


class Stopped(OutboxError):
    """A signal asked the program to end while it was waiting."""

    exit_code = 0


RETRIED_SQLSTATES = frozenset(
    {
        "53300",  # too_many_connections
        "55P03",  # lock_not_available
        "40001",  # serialization_failure
        "40P01",  # deadlock_detected
        "57014",  # query_canceled: statement_timeout
        "25006",  # read_only_sql_transaction: a failover, or an hour of maintenance
    }
)


def from_sqlstate(sqlstate: str | None, message: str, doing: str, hint: str = "") -> OutboxError:
    """The error of ours for a server's error while `doing` something; by SQLSTATE, never by text.

    Appendix A of PostgreSQL's manual. An unknown class is not retried: a loop on it would hide it.
    """
    text = f"{doing}: {message} ({sqlstate or 'no SQLSTATE'})"
    if sqlstate is None or sqlstate[:2] in ("08", "57", "58") or sqlstate in RETRIED_SQLSTATES:
        return ConnectionLost(text)
    if sqlstate == "55006":
        return SlotInUse(text)
    if sqlstate == "42501":
        return PreconditionError(
            text,
            "sql/role_relay.sql lists what the relay's role needs; init-slot is for an owner of the table with the"
            " attribute REPLICATION",
        )
    if sqlstate == "42P01":
        return PreconditionError(text, "run `cdc-outbox init-slot`: it makes what is missing")
    # 55000 on a replication connection is a lost slot (replication.py); of a DELETE it is a missing replica identity.
    if sqlstate[:2] in ("28", "3D", "3F", "42", "53", "55", "0A", "25"):
        return PreconditionError(text, hint)
    return OutboxError(text, hint)


def one_line(text: str) -> str:
    return " ".join(text.split())
