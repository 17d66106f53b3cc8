"""Long work on a terminal says how far it is; in a file or a pipe it says nothing of that."""

import os
import pty
import re
import signal
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from cdc_outbox.progress import sentence, time_left
from tests.fix_command import EXECUTABLE
from tests.fix_proxy import StartProxy
from tests.slot_rig import SlotRig
from tests.waiting import eventually

CLEAR = "\r\x1b[K"
COLUMNS = 100


class Terminal:
    """The command with its stderr on a terminal, and what that was sent."""

    def __init__(self, *args: object, **variables: str) -> None:
        self._own, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (40, COLUMNS))
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("CDC_OUTBOX_", "PG"))}
        env = {**clean, "TERM": "xterm", **variables}
        command = [str(EXECUTABLE), *map(str, args)]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, env=env)
        os.close(theirs)
        self._text = b""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._own, 4096)
            except OSError:  # so Linux says that the other side is closed
                return
            if not piece:
                return
            self._text += piece

    @property
    def text(self) -> str:
        return self._text.decode().replace("\r\n", "\n")

    @property
    def progress(self) -> list[str]:
        """What was shown on the line that is written over."""
        return [found for found in re.findall(r"\r\x1b\[K([^\r\n\x1b]+)", self.text) if not found.startswith("20")]

    def wait_for(self, text: str) -> None:
        try:
            eventually(lambda: any(text in line for line in self.progress), 60)
        except AssertionError:
            raise AssertionError(f"no {text!r} in {self.text!r}") from None

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._thread.join(20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        os.close(self._own)


@contextmanager
def terminal(*args: object, **variables: str) -> Iterator[Terminal]:
    started = Terminal(*args, **variables)
    try:
        yield started
    finally:
        started.close()


def left_behind(text: str) -> str:
    """What a person sees in the end: each line, after what was written over it."""
    return "\n".join(re.split(r"\r(?:\x1b\[K)?", line)[-1] for line in text.split("\n"))


def slow_stream(rig: SlotRig, proxy: StartProxy) -> list[str]:
    """Of a backlog that takes some seconds to read."""
    for _ in range(40):
        rig.stage(count=100, padding=400)
    link = proxy(rig.database.server.port)
    link.slow(bytes_per_second=600_000, direction="to_client")
    return [*rig.stream_options, "--dsn", rig.database.server.dsn(rig.database.name, port=link.port)]


def test_a_relay_shows_how_far_its_backlog_is_until_it_has_caught_up(ready: SlotRig, proxy: StartProxy) -> None:
    with terminal("stream", *slow_stream(ready, proxy)) as shown:
        shown.wait_for(" left")
        eventually(
            lambda: ready.confirmed >= ready.wal_position - 2**24 and shown.text.endswith(CLEAR), 60, "it is over"
        )
        count = len(shown.progress)
        ready.stage(count=5)
        shown.process.send_signal(signal.SIGTERM)
        assert shown.process.wait(30) == 0
    assert len(shown.progress) == count
    for line in shown.progress:
        assert re.fullmatch(r"relayed [\d,]+ rows, [\d,]+/s(, [\d.]+ (s|min|h) left)?", line)
    assert all(line[:4] == "2026" or line[:2] == "20" for line in left_behind(shown.text).splitlines() if line)


def test_until_caught_up_shows_it_too_and_log_lines_stay_whole(ready: SlotRig, proxy: StartProxy) -> None:
    with terminal("stream", *slow_stream(ready, proxy), "--until-caught-up", NO_COLOR="1") as shown:
        assert shown.process.wait(120) == 0
    assert shown.progress
    assert "\x1b[" not in shown.text.replace(CLEAR, "")
    lines = [line for line in left_behind(shown.text).splitlines() if line]
    assert all(re.match(r"\d{4}-\d\d-\d\dT\S+ (info|warning): ", line) for line in lines)
    assert "stopped; 4000 rows relayed" in lines[-1]


def test_a_log_line_that_comes_meanwhile_stands_for_itself(ready: SlotRig, proxy: StartProxy) -> None:
    with terminal("stream", *slow_stream(ready, proxy), "--until-caught-up") as shown:
        shown.wait_for(" left")
        ready.database.execute(
            "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s", (ready.slot,)
        )
        assert shown.process.wait(120) == 0
    lines = [line for line in left_behind(shown.text).splitlines() if line]
    assert all(re.match(r"\d{4}-\d\d-\d\dT\S+ (info|warning): ", line) for line in lines), lines
    assert any("starting over from the slot" in line for line in lines)


def test_a_terminal_that_cannot_take_a_line_back_gets_none(ready: SlotRig, proxy: StartProxy) -> None:
    with terminal("stream", *slow_stream(ready, proxy), "--until-caught-up", TERM="dumb") as shown:
        assert shown.process.wait(120) == 0
    assert "\r" not in shown.text
    assert "rows, " not in shown.text


def test_a_file_gets_none(ready: SlotRig, proxy: StartProxy) -> None:
    done = ready.command.run("stream", *slow_stream(ready, proxy), "--until-caught-up")
    assert done.returncode == 0
    assert "\r" not in done.stdout + done.stderr
    assert " left" not in done.stderr


PUT_BACK = ("alter publication {publication} drop table outbox", "alter publication {publication} add table outbox")


def test_init_slot_shows_how_many_rows_go_through_the_slot_again_while_they_wait(ready: SlotRig) -> None:
    ready.stage(count=3)
    ready.alter(*PUT_BACK)  # the slot stays, so that nothing but the rows waits for the other transaction
    with ready.database.connect(autocommit=False) as other:
        other.execute("select from outbox limit 1 for update")
        with terminal("init-slot", *ready.names) as shown:
            shown.wait_for("requeueing 3 rows, ")
            other.rollback()
            assert shown.process.wait(30) == 0
    assert "left" not in shown.text


SLOW = """
create function slow() returns trigger language plpgsql as $$ begin perform pg_sleep(0.002); return new; end $$;
create trigger slow before insert on outbox for each row execute function slow()"""


def test_init_slot_shows_how_many_of_them_are_done(ready: SlotRig) -> None:
    ready.stage(count=2000, padding=300)
    ready.alter(*PUT_BACK)
    ready.alter(*SLOW.split(";\n"))
    with terminal("init-slot", *ready.names) as shown:
        assert shown.process.wait(120) == 0
    told = [
        re.fullmatch(r"requeueing about ([\d,]+) of 2,000 rows, [\d,]+/s, [\d.]+ s left", line)
        for line in shown.progress
    ]
    assert any(told), shown.text
    numbers = [int(found[1].replace(",", "")) for found in told if found]
    assert len(numbers) > 1
    assert numbers == sorted(numbers)
    assert numbers[-1] > numbers[0]


def test_replay_shows_how_many_rows_are_staged_again(ready: SlotRig) -> None:
    ready.stage(count=2000, padding=300)
    relay = ready.stream()
    eventually(lambda: ready.purge("--archive") and ready.backlog == 0, 30, "all is archived")
    assert relay.terminate() == 0
    ready.alter("vacuum analyze outbox_archive", "truncate outbox", *SLOW.split(";\n"))
    with terminal("replay", *ready.names, "--since", "1h") as shown:
        assert shown.process.wait(120) == 0
    assert shown.progress, shown.text
    assert any(re.match(r"staging about [\d,]+ of 2,000 rows, ", line) for line in shown.progress)
    assert ready.backlog == 2000


def test_a_purge_and_a_look_show_none(ready: SlotRig) -> None:
    for name in ("status", "drop-slot"):
        with terminal(name, *ready.names, *(["--yes"] if name == "drop-slot" else [])) as shown:
            assert shown.process.wait(30) == 0
        assert shown.text == ""


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (lambda: sentence("relayed", 0, 0.0), "relayed 0 rows, 0/s"),
        (lambda: sentence("relayed", 1_200_000, 10.0), "relayed 1,200,000 rows, 120,000/s"),
        (lambda: sentence("relayed", 500, 5.0, share=0.25), "relayed 500 rows, 100/s, 15 s left"),
        (lambda: sentence("staging", 500, 5.0, of=1000, share=0.5), "staging 500 of 1,000 rows, 100/s, 5 s left"),
        (lambda: time_left(99.4), "99 s"),
        (lambda: time_left(3600), "60 min"),
        (lambda: time_left(36_000), "10.0 h"),
    ],
)
def test_what_is_said(what: Callable[[], str], expected: str) -> None:
    assert what() == expected
