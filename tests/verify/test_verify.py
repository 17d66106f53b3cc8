"""`verify` on real servers: green on a sound relay, red where a relay breaks a promise, and nothing left behind."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cdc_outbox import gates
from cdc_outbox.embedded import free_port
from tests.fix_command import Command
from tests.fix_kafka import Broker, CreateTopic
from tests.fix_postgres import Database, StartPostgres
from tests.waiting import eventually

MUTANTS = Path(__file__).with_name("mutants")
OURS = "cdc_outbox_verify_"


class Verify:
    def __init__(self, command: Command, broker: Broker) -> None:
        self.command, self.broker = command, broker

    def arguments(self, database: Database, *options: str) -> list[str]:
        return ["verify", "--dsn", database.dsn, "--bootstrap-servers", self.broker.bootstrap, *options]

    def run(self, database: Database, *options: str, mutant: str = "") -> subprocess.CompletedProcess[str]:
        env = {"PYTHONPATH": str(MUTANTS), "MUTANT": mutant} if mutant else {}
        return self.command.run(*self.arguments(database, *options), env=env, timeout=150)

    def verdicts(self, database: Database, *tried: str, mutant: str = "") -> dict[str, str]:
        """Gate -> verdict, of those that were tried."""
        done = self.run(database, *(text for gate in tried for text in ("--gate", gate)), "--json", mutant=mutant)
        assert done.stdout, done.stderr
        report = json.loads(done.stdout)
        found = {gate["gate"]: gate["verdict"] for gate in report["gates"]}
        assert done.returncode == (0 if report["ok"] else 1), done.stderr
        assert report["ok"] == (set(found.values()) == {"ok"})
        return found


@pytest.fixture
def verify(command: Command, broker: Broker, database: Database) -> Iterator[Verify]:
    yield Verify(command, broker)
    assert left_behind(database, broker) == []


def left_behind(database: Database, broker: Broker) -> list[str]:
    query = f"""
    select slot_name from pg_replication_slots where slot_name ^@ '{OURS}' and database = current_database()
    union all select pubname from pg_publication where pubname ^@ '{OURS}'
    union all select nspname from pg_namespace where nspname ^@ '{OURS}'
    union all select application_name from pg_stat_activity
    where application_name ^@ '{OURS}' and datname = current_database()"""
    # On a broker that is not ours others may be verifying.
    topics = [name for name in broker.admin.list_topics(timeout=10).topics if name.startswith(OURS) and broker.server]
    return [row[0] for row in database.fetch(query)] + topics


@pytest.mark.slow  # it kills relays, waits for purges that must not come, and idles
def test_every_promise_is_kept_and_the_table_says_what_was_tried(verify: Verify, database: Database) -> None:
    done = verify.run(database)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("G")] == [[gate, "ok"] for gate in gates.ALL]
    figures = [line.strip() for line in lines if " rows, " in line]
    assert len(figures) == 8  # all but G7, which counts questions
    assert not any(line.startswith("0 rows") for line in figures)


@pytest.mark.slow  # G7 watches an idle relay, G3 and G4 start several
@pytest.mark.parametrize(
    ("mutant", "verdicts"),
    [
        ("purge_by_id", {"G1": "ok", "G5": "fail"}),
        ("confirm_early", {"G2": "ok", "G3": "fail", "G4": "fail"}),
        ("polling", {"G1": "ok", "G7": "fail"}),
    ],
)
def test_a_relay_that_breaks_a_promise_is_found_by_the_gate_for_it(
    verify: Verify, database: Database, mutant: str, verdicts: dict[str, str]
) -> None:
    assert verify.verdicts(database, *verdicts, mutant=mutant) == verdicts


@pytest.mark.slow  # a server of its own, and a commit that waits
def test_a_relay_without_the_visibility_gate_is_found_where_a_standby_does_not_answer(
    verify: Verify, postgres_server: StartPostgres, new_database: Callable[..., Any]
) -> None:
    server = postgres_server(synchronous_standby_names="ghost")
    database = new_database(server)
    assert verify.verdicts(database, "G8") == {"G8": "ok"}
    assert verify.verdicts(database, "G1", "G8", mutant="gate_off") == {"G1": "ok", "G8": "fail"}
    assert left_behind(database, verify.broker) == []


def test_ctrl_c_removes_everything_and_is_no_success(verify: Verify, database: Database) -> None:
    running = verify.command.start(*verify.arguments(database))
    active = f"select active from pg_replication_slots where slot_name ^@ '{OURS}' and database = current_database()"
    eventually(lambda: database.fetch(active) == [(True,)], 30, "a relay holds the slot")
    running.signal(signal.SIGINT)
    assert running.wait(30) == 1
    assert running.stderr_text().startswith("error: stopped after ")
    assert len(running.stderr_text().splitlines()) == 1


def test_a_topic_that_was_named_stays(verify: Verify, database: Database, topic: CreateTopic) -> None:
    name = topic(partitions=2)
    done = verify.run(database, "--gate", "G2", "--scratch-topic", name)
    assert done.returncode == 0, done.stderr
    records = verify.broker.read(name)
    assert records
    # What was there before is nobody's repeat.
    done = verify.run(database, "--gate", "G2", "--scratch-topic", name)
    assert done.returncode == 0, done.stderr
    assert len(verify.broker.read(name)) == 2 * len(records)


def test_what_cannot_be_tried_at_all_is_one_line_with_the_exit_code_of_its_kind(
    verify: Verify, database: Database
) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    database.execute(f'create role "{database.name}" login replication')
    try:
        for options, code, said in (
            (("--bootstrap-servers", nobody), 3, "Kafka: "),
            (("--scratch-topic", "no_such_topic"), 3, "topic no_such_topic does not exist"),
            (("-X", "acks=1"), 2, "would break a promise"),
            (("-X", "no.such.property=1"), 2, "no.such.property"),
            (("--dsn", f"{database.dsn} user={database.name}"), 3, "permission denied"),
            (("--dsn", f"host=127.0.0.1 port={free_port()}"), 3, "connection"),
        ):
            done = verify.run(database, *options)
            assert (done.returncode, done.stdout) == (code, ""), done.stderr
            assert said in done.stderr
            assert done.stderr.startswith("error: ")
            assert len(done.stderr.splitlines()) == 1, done.stderr
    finally:
        database.execute(f'drop role "{database.name}"')
