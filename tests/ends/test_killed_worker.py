"""Two workers read the same jobs, each job twice, and are killed at random: every effect happens once."""

from __future__ import annotations

import random
from pathlib import Path

import psycopg
import pytest

from cdc_outbox import Job, stage_many
from tests.ends.conftest import make_tables
from tests.ends.programs import Program, until, url
from tests.relay_rig import RelayRig
from tests.waiting import eventually

KILLS, BATCH = 20, 40
WORKERS = ("first", "second")
TABLES = """
create table attempts (
    n bigint generated always as identity, worker text not null, job text not null, phase text not null,
    committed_before boolean not null
);
create table effects (job text not null, phase text not null)"""  # with no key: a second effect would stay


class Jobs:
    """Delivered twice, the second time as after a lost slot: the rows go through the WAL again, under their ids."""

    def __init__(self, rig: RelayRig) -> None:
        self.rig = rig
        self.count = 0

    def deliver(self) -> None:
        """Some more, if the workers have little left to do."""
        if 3 * self.count - self.done() < BATCH:
            with psycopg.connect(self.rig.database.dsn) as db:
                stage_many(db, [Job("order", {"n": n}) for n in range(BATCH)])
            self.rig.database.execute(
                "with moved as (delete from outbox returning *)"
                " insert into outbox overriding system value select * from moved"
            )
            self.count += BATCH

    def done(self) -> int:
        return int(self.rig.database.fetch_value("select count(*) from effects"))


@pytest.mark.slow
def test_a_worker_killed_at_random_does_each_phase_exactly_once(rig: RelayRig, tmp_path: Path) -> None:
    make_tables(rig.database)
    rig.database.execute(TABLES)
    rig.stream()
    jobs, choice = Jobs(rig), random.Random()
    environment = {
        "DATABASE_URL": url(rig.database),
        "KAFKA_BOOTSTRAP_SERVERS": rig.broker.bootstrap,
        "WORKER_TOPIC": rig.topic,
    }

    def start(name: str) -> Program:
        return Program(tmp_path / name, "-m", "tests.ends.killed_worker", name, **environment)

    def attempts(name: str) -> int:
        return int(rig.database.fetch_value("select count(*) from attempts where worker = %s", (name,)))

    running = {name: start(name) for name in WORKERS}
    try:
        for kill in range(KILLS):
            name = WORKERS[kill % len(WORKERS)]
            enough = attempts(name) + choice.randint(1, 5)

            def works(name: str = name, enough: int = enough) -> bool:
                jobs.deliver()
                return running[name].check_running() and attempts(name) >= enough

            # At a moment within its work: after a few more phases that it began.
            eventually(works, 30, f"the {name} worker works, for kill {kill}")
            running[name].kill9()
            running[name] = start(name)
        until(rig.database, "select count(*) from effects", 3 * jobs.count, *running.values(), seconds=60)
        until(rig.database, f"select count(*) from inbox where id = '{jobs.count}'", 3, *running.values())
    finally:
        for program in running.values():
            program.kill9()
    each = (jobs.count, jobs.count)
    per_phase = "select phase, count(*), count(distinct job) from effects group by phase order by phase"
    assert rig.database.fetch(per_phase) == [("charge", *each), ("mail", *each), ("reserve", *each)]
    assert rig.database.fetch("select * from attempts where committed_before") == []
    # Some phases were begun again: the kills came within them.
    begun, done = rig.database.fetch("select count(*), count(distinct (job, phase)) from attempts")[0]
    assert begun > done == 3 * jobs.count
    print(f"{KILLS} kills, {jobs.count} jobs, {begun - done} phases begun again, none of them committed before")
