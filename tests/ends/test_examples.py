"""Each program in examples/ runs, on a real server, through a real relay and broker."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cdc_outbox import Job, stage_many
from tests.ends.conftest import make_tables
from tests.ends.programs import ROOT, Program, run, until, url
from tests.fix_command import Running
from tests.relay_rig import RelayRig
from tests.waiting import eventually

RECEIPTS = [("ann", 1), ("bob", 2), ("cid", 3)]
COUNT = "select count(*) from receipts"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


# -- applications -----------------------------------------------------------------------------------------------------


def jobs_of(rig: RelayRig) -> list[Any]:
    rig.catch_up()
    return [(record.headers["task"], record.key, json.loads(record.value or b"")) for record in rig.read()]


@pytest.mark.parametrize("name", ["psycopg", "sqlalchemy", "django"])
def test_an_application_stages_a_job_with_each_order_that_stays(name: str, rig: RelayRig, log: Path) -> None:
    printed = run(log, "-m", f"examples.app_{name}", DATABASE_URL=url(rig.database))
    assert printed.splitlines() == ["placed order 1", "rolled back: order 2 has no amount", "placed order 3"]
    assert rig.database.fetch("select id, customer, amount from orders order by id") == [(1, "ann", 30), (3, "cid", 12)]
    assert jobs_of(rig) == [
        (b"send_receipt", b"ann", {"order": 1, "customer": "ann"}),
        (b"send_receipt", b"cid", {"order": 3, "customer": "cid"}),
    ]


def test_an_application_may_make_the_table_before_init_slot(fresh: RelayRig, log: Path) -> None:
    run(log, "-m", "examples.app_sqlalchemy", DATABASE_URL=url(fresh.database))
    fresh.init()
    assert len(jobs_of(fresh)) == 2


# -- workers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def worked(rig: RelayRig) -> tuple[RelayRig, Running]:
    """A relay that runs, three jobs staged, and each of them twice on the topic; the worker's tables are empty."""
    make_tables(rig.database)
    with psycopg.connect(rig.database.dsn, autocommit=True) as db:
        db.execute((ROOT / "examples" / "worker.sql").read_bytes())
        with db.transaction():
            stage_many(db, [Job("send_receipt", {"order": n, "customer": c}, key=c) for c, n in RECEIPTS])
    relay = rig.stream()
    rig.read(until=lambda records: len(records) == 3)
    rig.database.execute(
        "with moved as (delete from outbox returning *) insert into outbox overriding system value select * from moved"
    )
    rig.read(until=lambda records: len(records) == 6)
    return rig, relay


def environment(rig: RelayRig) -> dict[str, str]:
    return {
        "DATABASE_URL": url(rig.database),
        "KAFKA_BOOTSTRAP_SERVERS": rig.broker.bootstrap,
        "WORKER_TOPIC": rig.topic,
        "WORKER_GROUP": rig.topic,
    }


def finish(rig: RelayRig, *programs: Program) -> None:
    """A last job shows that all before it were read: one partition, in order."""
    with psycopg.connect(rig.database.dsn) as db:
        stage_many(db, [Job("send_receipt", {"order": 4, "customer": "dan"})])
    until(rig.database, f"{COUNT} where order_id = 4", 1, *programs)
    found = Counter(rig.database.fetch("select customer, order_id from receipts"))
    assert found == Counter([*RECEIPTS, ("dan", 4)])


def test_the_worker_with_confluent_kafka_does_each_job_once(worked: tuple[RelayRig, Running], log: Path) -> None:
    rig, _ = worked
    with Program(log, "-m", "examples.worker_confluent", **environment(rig)) as worker:
        finish(rig, worker)
        with psycopg.connect(rig.database.dsn) as db:
            stage_many(db, [Job("ship_order", {"order": 7})])
        until(rig.database, "select label from parcels union all select null limit 1", "label for order 7", worker)
        assert worker.terminate() == 0
    steps = rig.database.fetch("select step, result from inbox where step <> '' order by step")
    assert steps == [("label", "label for order 7"), ("parcel", 1)]


def test_the_worker_with_faststream_does_each_job_once(worked: tuple[RelayRig, Running], log: Path) -> None:
    rig, _ = worked
    with Program(log, "-m", "examples.worker_faststream", **environment(rig)) as worker:
        finish(rig, worker)
        assert worker.terminate() == 0


def test_the_worker_with_faststream_goes_back_to_a_job_that_failed(worked: tuple[RelayRig, Running], log: Path) -> None:
    rig, _ = worked
    rig.database.execute("alter table receipts add constraint no_bob check (customer <> 'bob')")
    with Program(log, "-m", "examples.worker_faststream", **environment(rig)) as worker:
        eventually(lambda: worker.check_running() and "no_bob" in worker.output(), 30, "the job fails")
        rig.database.execute("alter table receipts drop constraint no_bob")
        finish(rig, worker)


def test_celery_does_each_job_once_that_the_bridge_hands_on(
    worked: tuple[RelayRig, Running], log: Path, tmp_path: Path
) -> None:
    rig, _ = worked
    folders = {name: str(tmp_path / "queue") for name in ("data_folder_in", "data_folder_out", "control_folder")}
    (tmp_path / "queue").mkdir()
    variables = environment(rig) | {"CELERY_BROKER_URL": "filesystem://", "CELERY_BROKER_OPTIONS": json.dumps(folders)}
    celery = ["-m", "celery", "--app", "examples.celery_bridge", "worker", "--pool", "solo"]
    with (
        Program(log, *celery, "--without-gossip", "--without-mingle", **variables) as worker,
        Program(tmp_path / "bridge.log", "-m", "examples.celery_bridge", **variables) as bridge,
    ):
        finish(rig, bridge, worker)
    ids = rig.database.fetch("select id::bigint from inbox order by 1")
    assert ids == [(1,), (2,), (3,), (4,)]
