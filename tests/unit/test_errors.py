import pytest

from cdc_outbox import errors
from cdc_outbox.errors import (
    BatchRefused,
    ConfigError,
    ConnectionLost,
    DeliveryFailed,
    GapError,
    OutboxError,
    PreconditionError,
    ProtocolError,
    RecordRefused,
    SlotInUse,
    Stopped,
    TopicMissing,
    from_sqlstate,
)

CLASSIFIED = [
    # Goes away by itself: the relay comes back to it.
    (None, ConnectionLost),  # the connection broke
    ("08006", ConnectionLost),  # connection_failure
    ("08001", ConnectionLost),
    ("57P01", ConnectionLost),  # admin_shutdown
    ("57P02", ConnectionLost),  # crash_shutdown
    ("57P03", ConnectionLost),  # cannot_connect_now
    ("57014", ConnectionLost),  # query_canceled
    ("58000", ConnectionLost),  # system_error
    ("58030", ConnectionLost),  # io_error
    ("53300", ConnectionLost),  # too_many_connections
    ("55P03", ConnectionLost),  # lock_not_available
    ("40001", ConnectionLost),
    ("40P01", ConnectionLost),
    ("25006", ConnectionLost),  # read_only_sql_transaction: a failover
    # Another relay.
    ("55006", SlotInUse),  # object_in_use
    ("58P01", ConnectionLost),  # undefined_file; on a replication connection it is a gap
    # For an operator.
    ("28P01", PreconditionError),  # invalid_password
    ("28000", PreconditionError),
    ("3D000", PreconditionError),  # no such database
    ("3F000", PreconditionError),  # no such schema
    ("42501", PreconditionError),  # insufficient_privilege
    ("42704", PreconditionError),  # undefined_object: a publication
    ("42P01", PreconditionError),  # undefined_table
    ("53400", PreconditionError),  # configuration_limit_exceeded: no replication slot is free
    ("53100", PreconditionError),  # disk_full
    ("55000", PreconditionError),  # object_not_in_prerequisite_state: a DELETE without a replica identity
    ("0A000", PreconditionError),
    # Never seen: not retried, since a loop would hide it.
    ("XX000", OutboxError),
    ("23505", OutboxError),
    ("22P02", OutboxError),
]


@pytest.mark.parametrize(("sqlstate", "kind"), CLASSIFIED)
def test_a_servers_error_is_classified_by_its_sqlstate(sqlstate: str | None, kind: type[OutboxError]) -> None:
    error = from_sqlstate(sqlstate, "words that do not matter", "reading the slot")
    assert type(error) is kind
    assert str(error).startswith("reading the slot: words that do not matter (")
    assert (sqlstate or "no SQLSTATE") in str(error)


def test_a_missing_privilege_names_the_file_that_lists_them() -> None:
    assert "sql/role_relay.sql" in from_sqlstate("42501", "no", "purging", "another hint").hint


def test_the_callers_hint_goes_along_with_what_an_operator_must_mend() -> None:
    assert from_sqlstate("42704", "no publication", "streaming", "make it").hint == "make it"


@pytest.mark.parametrize(
    ("kind", "exit_code", "retry"),
    [
        (OutboxError, 1, False),
        (ConfigError, 2, False),
        (PreconditionError, 3, False),
        (GapError, 4, False),
        (RecordRefused, 5, False),
        (SlotInUse, 6, True),
        (ProtocolError, 1, False),
        (ConnectionLost, 3, True),
        (DeliveryFailed, 1, True),
        (BatchRefused, 1, True),
        (Stopped, 0, False),
    ],
)
def test_each_error_has_its_exit_code_and_says_whether_it_is_retried(
    kind: type[OutboxError], exit_code: int, retry: bool
) -> None:
    assert (kind.exit_code, kind.retry) == (exit_code, retry)


def test_every_kind_of_error_has_a_sentence_of_its_own_as_its_default_message() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OutboxError)]
    messages = [str(kind()) for kind in kinds if kind not in (BatchRefused, TopicMissing)]
    assert len(set(messages)) == len(messages) > 8
    assert str(GapError()).startswith("The slot is missing, lost, or was moved")


def test_messages_and_hints_are_one_line() -> None:
    error = OutboxError("a server\n  DETAIL:\tsays\r\nmore", "do\nthis")
    assert str(error) == "a server DETAIL: says more"
    assert error.hint == "do this"


def test_a_refused_batch_knows_its_transaction() -> None:
    assert BatchRefused(0xA0, "jobs", "too large").final_lsn == 0xA0
