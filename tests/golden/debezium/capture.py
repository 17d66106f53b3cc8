"""What Debezium's outbox event router makes of rows: `python -m tests.golden.debezium.capture` (Java and Maven).

Kafka Connect runs the PostgreSQL connector with the router, twice: as it is documented without any option, and with
the column `type` as a header. Key and value are converted by StringConverter, which writes them as they are.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

import psycopg

from cdc_outbox.embedded import PostgresServer, free_port, postgres_bindir
from tests.fix_kafka import Broker, Record
from tests.kafka_server import KafkaServer
from tests.waiting import eventually

FOLDER = Path(__file__).parent
TABLE = """
create table outbox (
    id uuid not null primary key,
    aggregatetype varchar(255) not null,
    aggregateid varchar(255) not null,
    type varchar(255) not null,
    payload jsonb
)"""
ROWS = [
    ("order", "1", "OrderCreated", '{"id": 1, "lines": [{"item": "Book", "price": 39.98}], "customer": 123}'),
    ("order", "1", "OrderLineUpdated", '{"b": 1.10, "a": 9007199254740993, "ü": "größe \\" \\\\ 🐘"}'),
    ("customer", "größe 7", "CustomerMoved", '[1, null, "x"]'),
    ("customer", "7", "CustomerNamed", '"a text"'),
    ("customer", "7", "CustomerCounted", "0"),
    ("customer", "7", "CustomerNulled", "null"),
    ("customer", "7", "CustomerDeleted", None),
    ("customer", "", "CustomerWithoutKey", "{}"),
    ("order", "2", "", '{"huge": 1e30, "zero": -0.0}'),
]
DELETED_AT_ONCE = ("order", "3", "OrderForgotten", '{"n": 1}')
ROUTERS = {
    "default": "transforms.outbox.route.topic.replacement=outbox.event.${routedByValue}",
    "typed": "transforms.outbox.route.topic.replacement=typed.event.${routedByValue}\n"
    "transforms.outbox.table.fields.additional.placement=type:header:eventType",
}
TOPICS = {
    "default": ("outbox.event.order", "outbox.event.customer"),
    "typed": ("typed.event.order", "typed.event.customer"),
}
WORKER = """
bootstrap.servers={bootstrap}
key.converter=org.apache.kafka.connect.storage.StringConverter
value.converter=org.apache.kafka.connect.storage.StringConverter
offset.storage.file.filename={folder}/offsets
listeners=http://127.0.0.1:{port}
"""
CONNECTOR = """
name={name}
connector.class=io.debezium.connector.postgresql.PostgresConnector
tasks.max=1
plugin.name=pgoutput
slot.name=router_{name}
publication.name=router_{name}
publication.autocreate.mode=filtered
database.hostname=127.0.0.1
database.port={port}
database.user=postgres
database.password=none
database.dbname=postgres
topic.prefix={name}
table.include.list=public.outbox
snapshot.mode=no_data
transforms=outbox
transforms.outbox.type=io.debezium.transforms.outbox.EventRouter
{router}
"""


def row_id(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012}"


def write(database: psycopg.Connection[tuple[object, ...]]) -> None:
    """What an application does, and what it should not do: the router knows inserts only."""
    insert = "insert into outbox values (%s, %s, %s, %s, %s::jsonb)"
    for number, row in enumerate(ROWS, 1):
        database.execute(insert, (row_id(number), *row))
    with database.transaction():
        database.execute(insert, (row_id(len(ROWS) + 1), *DELETED_AT_ONCE))
        database.execute("delete from outbox where id = %s", (row_id(len(ROWS) + 1),))
    database.execute("update outbox set type = 'Changed' where id = %s", (row_id(1),))
    database.execute("delete from outbox where id = %s", (row_id(1),))


def as_golden(topic: str, record: Record) -> dict[str, object]:
    """Without offsets and times, and without the headers in which Connect names the connector."""
    headers = {name: value for name, value in record.headers.items() if not name.startswith("__debezium.")}
    return {
        "topic": topic,
        "key": record.key.decode() if record.key is not None else None,
        "value": record.value.decode() if record.value is not None else None,
        "headers": {name: value.decode() if value is not None else None for name, value in headers.items()},
    }


def capture(folder: Path) -> dict[str, list[dict[str, object]]]:
    jars = folder / "jars"
    copy = ["mvn", "-q", "-B", "-f", str(FOLDER / "pom.xml"), "dependency:copy-dependencies"]
    subprocess.run([*copy, f"-DoutputDirectory={jars}"], check=True)
    with PostgresServer(postgres_bindir(18)) as postgres, KafkaServer() as kafka:
        broker = Broker("kafka", kafka.start().bootstrap, kafka)
        for topic in sum(TOPICS.values(), ()):
            broker.create_topic(topic)
        with psycopg.connect(postgres.start().dsn(), autocommit=True) as database:
            database.execute(TABLE)
            worker = folder / "worker.properties"
            worker.write_text(WORKER.format(bootstrap=kafka.bootstrap, folder=folder, port=free_port()))
            connectors = [folder / f"{name}.properties" for name in ROUTERS]
            for (name, router), path in zip(ROUTERS.items(), connectors, strict=True):
                path.write_text(CONNECTOR.format(name=name, router=router, port=postgres.port))
            main = ["-cp", f"{jars}/*", "org.apache.kafka.connect.cli.ConnectStandalone"]
            with (folder / "log").open("wb") as log:
                connect = subprocess.Popen(["java", *main, worker, *connectors], stdout=log, stderr=log)
            try:
                streaming = "select count(*) from pg_replication_slots where active"
                eventually(lambda: database.execute(streaming).fetchone() == (2,), 120, "both connectors stream")
                write(database)
                return {
                    name: [
                        as_golden(topic, record)
                        for topic, count in zip(topics, (4, 6), strict=True)
                        for record in broker.read(topic, until=lambda records, count=count: len(records) >= count)  # type: ignore[misc]
                    ]
                    for name, topics in TOPICS.items()
                }
            finally:
                connect.kill()
                connect.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        golden = json.dumps(capture(Path(scratch)), indent=1, ensure_ascii=False)
    (FOLDER / "records.json").write_text(golden + "\n", encoding="utf-8")
