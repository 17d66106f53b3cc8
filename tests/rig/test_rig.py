"""The rig keeps its own promises: a test that fails should mean the product, not the rig."""

import signal
import socket
import time

import psycopg
import pytest
from confluent_kafka import Producer

from tests.fix_command import Command
from tests.fix_kafka import Broker, CreateTopic
from tests.fix_postgres import Database, StartPostgres
from tests.fix_proxy import StartProxy
from tests.kafka_server import silent
from tests.waiting import eventually


def produce(bootstrap: str, topic: str, *values: bytes) -> None:
    reports = []
    config = {"bootstrap.servers": bootstrap, "acks": "all", "message.timeout.ms": 20000}
    producer = Producer(config, logger=silent)
    for value in values:
        producer.produce(
            topic,
            value,
            key=b"key",
            headers=[("id", b"1")],
            timestamp=1_700_000_000_000,
            on_delivery=lambda error, _: reports.append(error),
        )
    producer.flush(20)
    assert reports == [None] * len(values)


def test_postgres_decodes_logically(database: Database) -> None:
    database.execute("select pg_create_logical_replication_slot('rig', 'pgoutput')")
    assert database.fetch_value("select count(*) from pg_replication_slots") == 1


def test_a_database_is_dropped_with_its_sessions_slots_and_prepared_transactions(
    database: Database,
) -> None:
    database.execute("select pg_create_logical_replication_slot('rig_dropped', 'pgoutput')")
    database.execute("create table t (i int)")
    database.execute("begin; insert into t values (1); prepare transaction 'rig'")
    with psycopg.connect(database.socket_dsn):
        database.drop()
        with psycopg.connect(database.server.dsn()) as other:
            query = "select count(*) from pg_replication_slots where slot_name = 'rig_dropped'"
            assert other.execute(query).fetchone() == (0,)


def test_a_killed_postgres_comes_back_with_its_data(postgres_server: StartPostgres) -> None:
    server = postgres_server(max_wal_senders=3)
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("create table t (i int)")
        server.kill9()
    server.start()
    with psycopg.connect(server.dsn()) as connection:
        assert connection.execute("select count(*) from t").fetchone() == (0,)
        assert connection.execute("show max_wal_senders").fetchone() == ("3",)
    assert server.log_contains("automatic recovery in progress")


def test_the_broker_stores_what_was_produced(broker: Broker, topic: CreateTopic) -> None:
    name = topic(partitions=3)
    produce(broker.bootstrap, name, b"a", b"b", b"c")
    records = broker.read(name)
    assert [record.value for record in records] == [b"a", b"b", b"c"]
    assert {record.key for record in records} == {b"key"}
    assert records[0].headers == {"id": b"1"}
    assert records[0].timestamp == 1_700_000_000_000
    assert len(broker.read(name, until=lambda found: len(found) >= 2)) >= 2


def test_an_empty_topic_reads_as_nothing(broker: Broker, topic: CreateTopic) -> None:
    assert broker.read(topic()) == []


def test_reading_fails_when_the_deadline_passes(broker: Broker, topic: CreateTopic) -> None:
    with pytest.raises(AssertionError, match="0 records"):
        broker.read(topic(), until=len, deadline=0.2)


@pytest.mark.kafka_only
def test_a_killed_kafka_keeps_its_records(private_broker: Broker, proxy: StartProxy) -> None:
    kafka = private_broker.kafka
    name = private_broker.create_topic()
    produce(kafka.bootstrap, name, b"before")
    kafka.pause()
    kafka.resume()
    kafka.kill9()
    kafka.start()
    proxied = proxy(kafka.proxied_port, listen_port=kafka.proxy_port)
    produce(kafka.proxied_bootstrap, name, b"through the proxy")
    assert proxied.bytes_to_server > 0
    assert [record.value for record in private_broker.read(name)] == [
        b"before",
        b"through the proxy",
    ]


def test_a_proxy_cuts_and_refuses_connections(database: Database, proxy: StartProxy) -> None:
    through = proxy(database.server.port)
    dsn = f"host=127.0.0.1 port={through.port} user=postgres dbname={database.name}"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("select 1")
        assert through.cut() == 1
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 1")
    through.refuse()
    with pytest.raises(psycopg.OperationalError, match="refused"):
        psycopg.connect(dsn)
    through.accept()
    psycopg.connect(dsn).close()
    eventually(lambda: through.connections == 0, 5, "the closed connection is gone")


def test_a_proxy_stalls_one_direction_and_loses_nothing(proxy: StartProxy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        through = proxy(listener.getsockname()[1])
        client = socket.create_connection(("127.0.0.1", through.port))
        server, _ = listener.accept()
        with client, server:
            client.settimeout(0.2)
            server.settimeout(5)
            through.stall("to_client")
            client.sendall(b"up")
            assert server.recv(10) == b"up"
            server.sendall(b"down")
            with pytest.raises(TimeoutError):
                client.recv(10)
            through.resume()
            client.settimeout(5)
            assert client.recv(10) == b"down"
            through.slow(bytes_per_second=100_000, direction="to_server")
            started = time.monotonic()
            client.sendall(bytes(20_000))
            client.shutdown(socket.SHUT_WR)
            received = 0
            while piece := server.recv(65536):
                received += len(piece)
            assert received == 20_000
            assert time.monotonic() - started >= 0.19


def test_the_command_runs_as_a_process(command: Command) -> None:
    done = command.run("--no-such-option")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    running = command.start("--version")
    assert running.wait() == 0
    stopped = command.start("--help")
    stopped.signal(signal.SIGKILL)
    assert stopped.wait() in (0, -9)
