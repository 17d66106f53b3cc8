"""`status` and `doctor` as they are typed."""

import json
import signal

import pytest

from tests.fix_command import Command
from tests.slot_rig import SlotRig, refusal
from tests.waiting import eventually


def test_status_prints_lines_for_people_and_json_for_programs(ready: SlotRig) -> None:
    done = ready.run("status")
    assert (done.returncode, done.stderr) == (0, "")
    names = [line[:14].strip() for line in done.stdout.splitlines()]
    assert names == ["slot", "next", "confirmed", "WAL held", "WAL left", "outbox", "dead letters", "archive"]
    assert done.stdout.startswith(f"slot          {ready.slot} (database {ready.database.name}, PostgreSQL ")
    done = ready.run("status", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["slot"]["name"] == ready.slot
    assert found["outbox"] == {"name": '"public"."outbox"', "rows": 0, "bytes": 16384, "oldest_seconds": None}


def test_status_goes_on_looking_and_finds_a_server_again_that_was_away(ready: SlotRig) -> None:
    name = f"watch {ready.slot}"
    watching = ready.command.start(
        "status", *ready.names, "--dsn", f"{ready.dsn} application_name='{name}'", "--json", "--watch", "100ms"
    )

    def looks() -> int:
        return watching.stdout_text().count("\n")

    eventually(lambda: looks() >= 2, 30, "it looks twice")
    end = "select count(pg_terminate_backend(pid, 5000)) from pg_stat_activity where application_name = %s"
    assert ready.database.fetch_value(end, (name,)) == 1
    watching.wait_for_log("warning: asking for settings: ")
    seen = looks()
    eventually(lambda: looks() > seen + 1, 30, "it looks again")
    watching.signal(signal.SIGINT)
    assert watching.wait() == 0
    assert all(json.loads(line)["slot"]["name"] == ready.slot for line in watching.stdout_text().splitlines())


def test_doctor_exits_3_if_a_check_fails_and_0_if_none_does(ready: SlotRig) -> None:
    done = ready.run("doctor", "--bootstrap-servers", ready.broker.bootstrap, "--topic", ready.topic)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ok    checkpoint guard: " in done.stdout
    assert "ok    topic: " in done.stdout
    ready.drop_slot()
    done = ready.run("doctor")
    assert (done.returncode, done.stderr) == (3, "")
    line, remedy = _with_remedy(done.stdout, "fail  slot: ")
    assert line.startswith(f"fail  slot: slot {ready.slot} does not exist")
    assert remedy.startswith("      -> run `cdc-outbox init-slot`")
    done = ready.run("doctor", "--json")
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert found["ok"] is False
    (check,) = [check for check in found["checks"] if check["verdict"] == "fail"]
    assert check.keys() == {"name", "verdict", "found", "remedy"}
    assert check["name"] == "slot"


def _with_remedy(text: str, start: str) -> tuple[str, str]:
    lines = text.splitlines()
    (place,) = [index for index, line in enumerate(lines) if line.startswith(start)]
    return lines[place], lines[place + 1]


@pytest.mark.parametrize("name", ["status", "doctor"])
def test_a_server_that_is_not_there_is_one_line_without_the_password(command: Command, name: str) -> None:
    done = command.run(name, "--dsn", "postgresql://someone:marker@127.0.0.1:1/app")
    assert done.returncode == 3
    assert "marker" not in done.stdout + done.stderr
    if name == "status":
        refusal(done, 3, "port 1 failed")
    else:
        assert done.stdout.startswith("fail  Postgres: connecting to Postgres: connection to server at")


def test_what_cannot_be_tried_is_a_wrong_option(command: Command) -> None:
    refusal(command.run("status", "--watch", "soon"), 2, "--watch", "'soon' is not a duration")
    refusal(command.run("doctor", "-b", "broker", "-X", "acks=0", "--topic", "a b"), 2, "-X acks=0", "--topic 'a b'")
    refusal(command.run("doctor", "--slot", "A-b"), 2, "--slot 'A-b'")
