"""A table with the columns of Debezium's outbox, relayed: records as that router makes them (tests/golden/debezium)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdc_outbox.config import Settings, check
from cdc_outbox.errors import ConfigError, PreconditionError
from cdc_outbox.event import OWN_HEADERS, Layout, RecordFormat
from cdc_outbox.metrics import Figures
from cdc_outbox.pgoutput import Column, Relation
from cdc_outbox.relay import Relay
from cdc_outbox.wakeup import Wakeup
from tests.fix_command import Command
from tests.fix_kafka import Broker
from tests.fix_postgres import Database
from tests.golden.debezium.capture import ROWS, TABLE, TOPICS, as_golden, write
from tests.relay_rig import RelayRig
from tests.waiting import eventually

GOLDEN = json.loads(Path(__file__).parents[1].joinpath("golden/debezium/records.json").read_text(encoding="utf-8"))
COLUMNS = {"task": "type", "args": "payload", "key": "aggregateid"}


class Moved(RelayRig):
    """Topics of its own: the router's, behind the name of the database."""

    @property
    def template(self) -> str:
        return f"{self.topic}.outbox.event.{{aggregatetype}}"

    def records(self) -> list[dict[str, Any]]:
        """Without the headers that are ours beside the router's."""
        found = []
        for topic in TOPICS["default"]:
            for record in self.broker.read(f"{self.topic}.{topic}"):
                golden: dict[str, Any] = as_golden(topic, record)
                assert golden["headers"].keys() >= OWN_HEADERS
                golden["headers"] = {
                    name: value for name, value in golden["headers"].items() if name == "id" or name not in OWN_HEADERS
                }
                found.append(golden)
        return found


@pytest.fixture
def moved(database: Database, broker: Broker, command: Command) -> Iterator[Moved]:
    """After `init-slot`, with the rows written and nothing relayed."""
    rig = Moved(database, broker, command, database.name)
    topics = [broker.create_topic(f"{rig.topic}.{topic}") for topic in TOPICS["default"]]
    try:
        database.execute(TABLE)
        rig.init()
        write(database.connect())
        yield rig
    finally:
        for topic in topics:
            broker.delete_topic(topic)


def test_consumers_of_debeziums_router_notice_no_difference(moved: Moved) -> None:
    options = [f"--column={role}={name}" for role, name in COLUMNS.items()]
    before = time.time()
    relay = moved.stream("--topic", moved.template, *options, "--purge-every", "100ms")
    eventually(lambda: moved.backlog == 0, 20, "everything is relayed and purged")
    relay.terminate()
    assert moved.records() == GOLDEN["default"]
    (last,) = moved.broker.read(f"{moved.topic}.{TOPICS['default'][0]}")[-1:]
    assert before - 60 < last.timestamp / 1000 < time.time()  # of the commit, where the router has its own


def test_the_type_is_a_header_as_the_router_adds_it(moved: Moved) -> None:
    settings = Settings(
        dsn=moved.database.dsn,
        slot=moved.slot,
        publication=moved.publication,
        bootstrap_servers=moved.broker.bootstrap,
        topic=moved.template,
        columns=COLUMNS,
        headers={"eventType": "type"},
        until_caught_up=True,
    )
    with Wakeup() as wakeup:
        Relay(settings, wakeup, Figures(moved.slot)).run()
    expected = [{**record, "topic": record["topic"].replace("typed.", "outbox.")} for record in GOLDEN["typed"]]
    assert moved.records() == expected
    assert len(expected) == len(ROWS) + 1


def test_a_header_whose_column_is_missing_is_named() -> None:
    relation = Relation(1, "public", "outbox", tuple(Column(name, 25) for name in ("id", "task", "args")))
    with pytest.raises(PreconditionError, match=r"public\.outbox has no column kind"):
        Layout(relation, RecordFormat(headers={"eventType": "kind"}))


def test_a_header_of_the_relays_own_name_is_refused() -> None:
    settings = Settings(bootstrap_servers="localhost:9092", headers={"id": "type", "kind": ""})
    with pytest.raises(ConfigError, match=r"--header kind: a column is missing; --header id: the relay sets that one"):
        check(settings, streaming=True)
