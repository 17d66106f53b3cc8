"""Every command of the README is run: those of the five minutes here, word for word, with other addresses."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cdc_outbox.embedded import PostgresServer, free_port, postgres_bindir
from cdc_outbox.errors import PreconditionError
from tests.fix_command import OURS, Command, path_with_curl, scrape
from tests.fix_kafka import Broker
from tests.fix_postgres import Database, StartPostgres
from tests.readme_blocks import Block, Readme
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
README = Readme.read(ROOT / "README.md")
STAGE, SERVER, RELAY, APPLICATION, DRAWING, PROGRAM, OPERATING, DEVELOPING = README.blocks

ELSEWHERE = {
    "make demo": "integration/test_demo.py::test_the_demo_loses_nothing_and_leaves_nothing_behind",
    "make why": "ends/test_why.py::test_each_wrong_way_fails_and_the_right_one_does_not",
    "make bench": "integration/test_benchmarks.py::test_a_small_drain_is_measured_beside_its_yardstick",
    "cdc-outbox verify": "verify/test_verify.py::test_every_promise_is_kept_and_the_table_says_what_was_tried",
    "cdc-outbox completion bash": "unit/test_help.py::test_bash_completes_commands_options_and_choices",
    "cdc-outbox init-slot": "integration/test_init_slot.py::test_a_second_run_changes_nothing",
}
"""Commands that take minutes, and the tests that run them."""
RECIPES = {
    "make demo": ".venv/bin/cdc-outbox demo",
    "make why": ".venv/bin/python -m examples.why",
    "make bench": ".venv/bin/python -m benchmarks",
    "make test-lowest": ".venv/lowest/bin/pytest --pg 18 -n 3 tests/unit",
    "make test": ".venv/bin/pytest --pg 18 -n 3 --dist worksteal",
    'make test PG=15 ARGS="-k purge"': ".venv/bin/pytest --pg 15 -n 3 --dist worksteal -k purge",
    "make lint": ".venv/bin/mypy",
}
"""What `make` runs last."""


def test_ci_tests_the_lowest_versions_too() -> None:
    assert "\nmake test-lowest " in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


OF_MAKE = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "JOBS", "PG", "ARGS", "PYTHON"}
"""What the `make` that runs these tests hands on."""


def test_no_command_is_left_out() -> None:
    here = {*RELAY.lines, *APPLICATION.lines, *OPERATING.lines}
    assert README.commands == here | ELSEWHERE.keys() | RECIPES.keys()
    for test in ELSEWHERE.values():
        file, name = test.split("::")
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("line", RECIPES)
def test_make_runs_what_the_tests_run(line: str) -> None:
    shown = subprocess.run(
        ["sh", "-c", line.replace("make ", "make -n ", 1)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in OF_MAKE},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown.replace("\\\n", "").splitlines()[-1].startswith(RECIPES[line])


@pytest.mark.parametrize("line", [line for line in RECIPES if line.startswith("make test")])
def test_make_test_finds_its_tests(line: str) -> None:
    _, *options = RECIPES[line].split()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.search(r"^\d+(/\d+)? tests collected", done.stdout, re.MULTILINE)


def test_what_an_application_writes_is_a_row(database: Database, command: Command) -> None:
    done = command.run("init-slot", "--dsn", database.dsn, "--slot", database.name, "--publication", database.name)
    assert done.returncode == 0, done.stderr
    database.execute(STAGE.text)
    assert database.fetch("select task, args from outbox") == [("send_receipt", {"order": 42})]


def test_both_ends_in_python(database: Database, command: Command) -> None:
    for line in ("init-slot --slot {name} --publication {name}", "init-inbox"):
        done = command.run(*line.format(name=database.name).split(), "--dsn", database.dsn)
        assert done.returncode == 0, done.stderr
    database.execute("create table orders (id int)")
    database.execute("create table receipts (for_order int)")
    message = SimpleNamespace(headers=lambda: [("id", b"1"), ("task", b"send_receipt")])
    for _ in range(2):  # the second time, the same message comes again
        exec(compile(PROGRAM.text, "README.md", "exec"), {"connection": database.connect(), "message": message})
    assert database.fetch_value("select count(*) from orders") == 2
    assert database.fetch("select task, args from outbox") == [("send_receipt", {"order": 42})] * 2
    assert database.fetch_value("select count(*) from receipts") == 1


class Terminal:
    """A shell of a user's own: their virtual environment first on the path, psql, and nothing of ours."""

    def __init__(self, folder: Path, addresses: dict[str, str], environment: dict[str, str]) -> None:
        self._folder = folder
        self.addresses = addresses
        self.environment = environment
        self.output = folder / "output"

    def text(self, block: Block) -> str:
        """What is typed: the block, with the addresses of the servers that are here."""
        text = "\n".join(block.lines)
        for written, real in self.addresses.items():
            text = text.replace(written, real)
        return text

    def run(self, block: Block) -> str:
        done = subprocess.run(
            ["bash", "-e", "-c", self.text(block)],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextlib.contextmanager
    def running(self, block: Block) -> Iterator[None]:
        """A block whose last command goes on until it is told to stop; that is clean, and leaves nobody behind."""
        script = self._folder / "script"
        script.write_text(self.text(block))
        with self.output.open("wb") as output:
            shell = subprocess.Popen(
                ["bash", "-e", str(script)],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            eventually(lambda: "streaming " in self._said(shell), 120, "the relay streams")
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)
            shell.wait(30)
            eventually(lambda: not _lives(shell.pid), 30, "the relay is gone")

    def _said(self, shell: subprocess.Popen[bytes]) -> str:
        ended = shell.poll() is not None
        text = self.output.read_text(errors="replace")
        assert not ended, text
        return text


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _psql(major: int) -> Path:
    """The folder of a psql: not every wheel with a server has one."""
    for candidate in (major, 18, 17, 16, 15):
        with contextlib.suppress(PreconditionError):
            if (postgres_bindir(candidate) / "psql").exists():
                return postgres_bindir(candidate)
    found = shutil.which("psql")
    assert found, "no psql on this machine"
    return Path(found).parent


@pytest.fixture
def virtual_environment(tmp_path: Path) -> Path:
    """Empty, but for a pip, and for the libraries: those of this environment, so that no network is needed."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = folder / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" -m pip "$@" -q --no-build-isolation\n')
    pip.chmod(0o755)
    return folder


@pytest.fixture
def terminal(
    postgres_server: StartPostgres, postgres_major: int, broker: Broker, virtual_environment: Path, tmp_path: Path
) -> Iterator[tuple[Terminal, PostgresServer]]:
    server = postgres_server(wal_level="replica")
    metrics = f"127.0.0.1:{free_port()}"
    addresses = {
        "localhost:5432": f"127.0.0.1:{server.port}",
        "localhost:9092": broker.bootstrap,
        "127.0.0.1:9187": metrics,
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith((*OURS, "PYTHON"))}
    path = f"{virtual_environment / 'bin'}:{_psql(postgres_major)}:{path_with_curl(tmp_path)}"
    environment = {
        **kept,
        "PATH": path,
        "HOME": str(tmp_path),
        "PIP_NO_INDEX": "1",
        "CDC_OUTBOX_METRICS_ADDRESS": metrics,
    }
    try:
        yield Terminal(tmp_path, addresses, environment), server
    finally:
        with contextlib.suppress(Exception):  # the topic of the README's name
            broker.delete_topic("outbox")


@pytest.mark.slow
def test_five_minutes_with_your_own_servers(
    terminal: tuple[Terminal, PostgresServer], broker: Broker, virtual_environment: Path
) -> None:
    shell, server = terminal
    superuser = shell.text(Block("sh", "psql postgresql://postgres@localhost:5432/postgres -v ON_ERROR_STOP=1 -f -"))
    subprocess.run(
        ["bash", "-c", superuser],
        input=SERVER.text,
        env=shell.environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    del server.settings["wal_level"]  # the server's own, as the block above has set it
    server.restart()
    with shell.running(RELAY):
        assert (virtual_environment / "bin" / "cdc-outbox").exists()
        assert "cdc_outbox_relayed_rows_total" in shell.run(APPLICATION)
        metrics = f"http://{shell.addresses['127.0.0.1:9187']}/metrics"
        relayed = 'cdc_outbox_relayed_rows_total{slot_name="cdc_outbox"}'
        eventually(lambda: scrape(metrics)[relayed] == 1, 30, "the row is relayed")
        (record,) = broker.read("outbox", until=bool)
        assert (record.key, record.value) == (b"hello", b"{}")
        app = Database(server, "app")
        eventually(lambda: app.fetch_value("select count(*) from outbox") == 0, 30, "the row is purged")
        shell.environment["CDC_OUTBOX_DSN"] = app.dsn
        printed = shell.run(OPERATING)
        assert "slot          cdc_outbox (database app" in printed
    assert "Traceback" not in shell.output.read_text()
