"""The inbox: claims and steps on connections of every client library, repeats one after the other and at once."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from uuid import UUID

import psycopg
import pytest

from cdc_outbox import Inbox, NotInTransaction
from cdc_outbox.inbox import InTransaction, message_id
from tests.ends.clients import KINDS, Client
from tests.ends.conftest import OpenClient
from tests.fix_kafka import Broker
from tests.fix_postgres import Database
from tests.waiting import eventually

every_client = pytest.mark.parametrize("kind", KINDS)
MESSAGE = {"id": "7", "task": "order"}
inbox = Inbox()


class Failed(Exception):
    """What a worker runs into."""


def claimed(client: Client, message: object = MESSAGE, which: Inbox = inbox) -> bool:
    done: bool = client.wait(which.once(client.connection, message))
    return done


def rows(database: Database, columns: str = "source, id, step") -> list[tuple[Any, ...]]:
    return database.fetch(f"select {columns} from inbox order by source, id, step")


# -- once -------------------------------------------------------------------------------------------------------------


@every_client
def test_a_job_is_claimed_once(kind: str, tables: Database, open_client: OpenClient) -> None:
    client = open_client(kind, tables)
    with client.transaction():
        assert claimed(client)
        assert not claimed(client)
    with client.transaction():
        assert not claimed(client)
        assert claimed(client, {"id": "8"})
        assert claimed(client, which=Inbox("another outbox"))
    assert rows(tables) == [("another outbox", "7", ""), ("outbox", "7", ""), ("outbox", "8", "")]


@every_client
def test_a_claim_vanishes_with_its_effect(kind: str, tables: Database, open_client: OpenClient) -> None:
    client = open_client(kind, tables)
    with contextlib.suppress(Failed), client.transaction():
        assert claimed(client)
        raise Failed
    assert rows(tables) == []
    with client.transaction():
        assert claimed(client)
    assert rows(tables) == [("outbox", "7", "")]


@every_client
def test_outside_a_transaction_nothing_is_claimed(kind: str, tables: Database, open_client: OpenClient) -> None:
    client = open_client(kind, tables, autocommit=True)
    with pytest.raises(NotInTransaction):
        claimed(client)
    assert rows(tables) == []


def waiting_for_a_lock(database: Database) -> int:
    query = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    return int(database.fetch_value(query))


@contextlib.contextmanager
def a_second_claim(database: Database) -> Any:
    """(the first worker's connection, whose claim is not committed yet; the second worker's answer, to come)."""
    first = database.connect(autocommit=False)
    assert inbox.once(first, MESSAGE)
    with ThreadPoolExecutor(1) as pool:

        def claim() -> bool:
            with psycopg.connect(database.socket_dsn) as second:
                return inbox.once(second, MESSAGE)

        answer = pool.submit(claim)
        eventually(lambda: waiting_for_a_lock(database) == 1, 10, "the second worker waits")
        yield first, answer


def test_a_repeat_at_the_same_time_waits_and_is_told(tables: Database) -> None:
    with a_second_claim(tables) as (first, answer):
        assert not answer.done()
        first.commit()
        assert answer.result(10) is False


def test_a_repeat_at_the_same_time_takes_over_when_the_first_fails(tables: Database) -> None:
    with a_second_claim(tables) as (first, answer):
        assert not answer.done()
        first.rollback()
        assert answer.result(10) is True


def test_a_repeat_waits_no_longer_than_its_lock_timeout(tables: Database) -> None:
    first, second = tables.connect(autocommit=False), tables.connect(autocommit=False)
    assert inbox.once(first, MESSAGE)
    second.execute("set local lock_timeout = '20ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        inbox.once(second, MESSAGE)


def test_under_repeatable_read_the_one_that_waited_in_vain_is_told_by_an_error(tables: Database) -> None:
    first, second = tables.connect(autocommit=False), tables.connect(autocommit=False)
    second.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    second.execute("select 1")
    assert inbox.once(first, MESSAGE)
    first.commit()
    with pytest.raises(psycopg.errors.SerializationFailure):
        inbox.once(second, MESSAGE)


# -- steps ------------------------------------------------------------------------------------------------------------


class Job:
    """Two phases that say that they ran, and the second of which fails as often as it is told to."""

    def __init__(self, client: Client, failures: int = 0) -> None:
        self.client = client
        self.failures = failures
        self.ran: list[str] = []

    def reserve(self) -> object:
        self.ran.append("reserve")
        return {"seat": "12a", "price": 1.10}

    def charge(self) -> object:
        self.ran.append("charge")
        if self.failures:
            self.failures -= 1
            raise Failed
        return ["paid", None]

    def run(self) -> tuple[Any, Any]:
        client = self.client
        seat = client.wait(inbox.step(client.connection, MESSAGE, "reserve", self.reserve))
        paid = client.wait(inbox.step(client.connection, MESSAGE, "charge", self.charge))
        return seat, paid


@pytest.mark.parametrize(
    ("kind", "autocommit"),
    # SQLAlchemy's AUTOCOMMIT has no transactions.
    [(kind, False) for kind in KINDS] + [(kind, True) for kind in KINDS if not kind.startswith("SQLAlchemy")],
)
def test_a_job_resumes_at_the_first_step_not_done(
    kind: str, autocommit: bool, tables: Database, open_client: OpenClient
) -> None:
    job = Job(open_client(kind, tables, autocommit=autocommit), failures=2)
    for _ in range(2):
        with pytest.raises(Failed):
            job.run()
        assert rows(tables) == [("outbox", "7", "reserve")]
    for _ in range(2):
        assert job.run() == ({"seat": "12a", "price": 1.10}, ["paid", None])
    assert job.ran == ["reserve", "charge", "charge", "charge"]
    assert [result for (result,) in rows(tables, "result")] == [["paid", None], {"seat": "12a", "price": 1.10}]


@every_client
def test_a_step_within_a_transaction_is_refused(kind: str, tables: Database, open_client: OpenClient) -> None:
    client = open_client(kind, tables)
    with client.transaction():
        claimed(client)
        with pytest.raises(InTransaction, match="commit it first"):
            client.wait(inbox.step(client.connection, MESSAGE, "charge", lambda: None))
    assert rows(tables) == [("outbox", "7", "")]


@pytest.mark.parametrize("kind", ["SQLAlchemy", "SQLAlchemy session", "SQLAlchemy async"])
def test_a_step_where_begin_begins_nothing_is_refused(kind: str, tables: Database, open_client: OpenClient) -> None:
    client = open_client(kind, tables, autocommit=True)
    with pytest.raises(NotInTransaction):
        client.wait(inbox.step(client.connection, MESSAGE, "charge", lambda: None))
    assert rows(tables) == []


@pytest.mark.parametrize("kind", ["psycopg async", "asyncpg", "SQLAlchemy async session"])
def test_a_step_of_an_asynchronous_worker_may_be_asynchronous(
    kind: str, tables: Database, open_client: OpenClient
) -> None:
    client = open_client(kind, tables)

    async def charge() -> str:
        return "paid"

    for _ in range(2):
        assert client.wait(inbox.step(client.connection, MESSAGE, "charge", charge)) == "paid"


def test_what_a_step_writes_commits_with_its_claim(own_tables: Database) -> None:
    own_tables.execute("create table effects (n int)")
    connection = own_tables.connect()

    def effect(fails: bool) -> None:
        connection.execute("insert into effects values (1)")
        if fails:
            raise Failed

    for fails in (True, False, False):
        with contextlib.suppress(Failed):
            inbox.step(connection, MESSAGE, "effect", functools.partial(effect, fails))
    assert own_tables.fetch_value("select count(*) from effects") == 1


def test_of_two_workers_in_one_step_the_second_gets_the_firsts_result(tables: Database) -> None:
    entered, leave = threading.Event(), threading.Event()
    ran: list[str] = []

    def work(name: str) -> Any:
        def charge() -> str:
            ran.append(name)
            entered.set()
            assert leave.wait(10)
            return f"paid by {name}"

        with psycopg.connect(tables.socket_dsn, autocommit=True) as connection:
            return inbox.step(connection, MESSAGE, "charge", charge)

    with ThreadPoolExecutor(2) as pool:
        first: Future[Any] = pool.submit(work, "first")
        assert entered.wait(10)
        second = pool.submit(work, "second")
        eventually(lambda: waiting_for_a_lock(tables) == 1, 10, "the second worker waits")
        leave.set()
        assert [first.result(10), second.result(10)] == ["paid by first", "paid by first"]
    assert ran == ["first"]


def test_a_result_that_is_not_json_undoes_its_step(tables: Database) -> None:
    connection = tables.connect()
    with pytest.raises(TypeError, match=r"result\.when is a object"):
        inbox.step(connection, MESSAGE, "charge", lambda: {"when": object()})
    assert rows(tables) == []
    with pytest.raises(ValueError, match="a step needs a name"):
        inbox.step(connection, MESSAGE, "", lambda: None)


# -- which job it is --------------------------------------------------------------------------------------------------


class Headers:
    """As aiokafka and FastStream have them: an attribute."""

    def __init__(self, headers: object) -> None:
        self.headers = headers


class HeadersCalled:
    """As confluent-kafka has them: a method."""

    def __init__(self, headers: object) -> None:
        self._headers = headers

    def headers(self) -> object:
        return self._headers


@pytest.mark.parametrize("wrapped", [lambda headers: headers, Headers, HeadersCalled])
@pytest.mark.parametrize(
    "headers",
    [
        [("id", b"7"), ("task", b"mail")],
        (("task", b"mail"), ("id", b"7"), ("id", b"8")),
        {"id": "7"},
        {"ce_specversion": "1.0", "ce_id": b"7"},
    ],
)
def test_a_job_is_known_by_its_header(wrapped: Callable[[object], object], headers: object) -> None:
    assert message_id(wrapped(headers)) == "7"


def test_an_id_is_itself() -> None:
    uuid = UUID("406c07f3-26f0-4eea-a50c-109940064b8f")
    assert [message_id(7), message_id("7"), message_id(uuid)] == ["7", "7", str(uuid)]


@pytest.mark.parametrize("message", [HeadersCalled(None), Headers({}), [("task", b"mail")], {"id": None}, ()])
def test_a_message_without_the_header_is_refused(message: object) -> None:
    with pytest.raises(ValueError, match="no header id"):
        message_id(message)


def test_a_record_that_confluent_kafka_read_is_known(broker: Broker) -> None:
    from confluent_kafka import Consumer, Producer, TopicPartition

    from tests.kafka_server import silent

    topic = broker.create_topic()
    producer = Producer({"bootstrap.servers": broker.bootstrap}, logger=silent)
    producer.produce(topic, b"{}", headers=[("id", b"7"), ("id", b"8")])
    assert producer.flush(10) == 0
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "unused"}, logger=silent)
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        message = eventually(lambda: consumer.poll(0.1), 20, "the record")
        assert message is not None
        assert message_id(message) == "7"
    finally:
        consumer.close()
        broker.delete_topic(topic)


# -- the trim ---------------------------------------------------------------------------------------------------------


@every_client
def test_jobs_are_forgotten_by_their_last_steps_age(kind: str, tables: Database, open_client: OpenClient) -> None:
    tables.execute(
        "insert into inbox (source, id, step, done_at) values ('outbox', 'old', '', now() - interval '8 days'),"
        " ('outbox', 'old steps', 'a', now() - interval '9 days'),"
        " ('outbox', 'old steps', 'b', now() - interval '8 days'),"
        " ('outbox', 'half way', 'a', now() - interval '9 days'), ('outbox', 'half way', 'b', now()),"
        " ('outbox', 'new', '', now() - interval '6 days')"
    )
    client = open_client(kind, tables)
    deleted: list[int] = []
    while not deleted or deleted[-1]:
        with client.transaction():
            deleted.append(client.wait(inbox.trim(client.connection, 7 * 86400, batch=2)))
    assert deleted == [2, 1, 0]
    assert rows(tables) == [
        ("outbox", "half way", "a"),
        ("outbox", "half way", "b"),
        ("outbox", "new", ""),
    ]
