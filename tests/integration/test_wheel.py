"""What a user installs: the wheel, built, installed into an environment of its own and run from another folder; and the
source distribution, from which the same wheel is built."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from cdc_outbox import __version__
from tests.fix_command import OURS
from tests.fix_postgres import Database

ROOT = Path(__file__).parents[2]
SQL = sorted(path.name for path in (ROOT / "sql").glob("*.sql"))


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith((*OURS, "PYTHON"))}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(target: str, folder: Path) -> Path:
    """Built with what is installed: no network."""
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder, cwd=ROOT)
    (found,) = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command in an environment that holds nothing but the wheel; its dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = (folder / "lib").glob("python*/site-packages")
    # A plain path: .pth files in there, such as an editable install's, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "cdc-outbox"


def test_the_wheel_holds_the_package_and_its_sql_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "cdc_outbox").rglob("*.py")}
    assert SQL
    assert {name for name in names if name.endswith(".sql")} == {f"cdc_outbox/sql/{file}" for file in SQL}
    assert {name for name in names if name.endswith(".py")} == modules
    assert "cdc_outbox/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"cdc_outbox", f"cdc_outbox-{__version__}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_installed_command_reads_its_own_sql_from_any_folder(
    installed: Path, database: Database, tmp_path: Path
) -> None:
    where = run(
        installed.with_name("python"), "-P", "-c", "import cdc_outbox; print(cdc_outbox.__file__)", cwd=tmp_path
    )
    assert Path(where.strip()).is_relative_to(installed.parents[1])
    printed = run(installed, "init-slot", "--dry-run", cwd=tmp_path, CDC_OUTBOX_DSN=database.dsn)
    assert 'create table if not exists "public"."outbox" (' in printed
    assert 'create publication "cdc_outbox" for table "public"."outbox"' in printed
    assert "pg_create_logical_replication_slot('cdc_outbox', 'pgoutput')" in printed
    assert printed.index("create publication") < printed.index("pg_create_logical_replication_slot")
    assert database.fetch_value("select to_regclass('outbox')") is None
    assert database.fetch("select 1 from pg_replication_slots where database = current_database()") == []


def test_the_installed_command_tells_its_version(installed: Path, tmp_path: Path) -> None:
    assert run(installed, "--version", cwd=tmp_path) == f"cdc-outbox, version {__version__}\n"


def test_the_package_is_a_program_too(installed: Path, tmp_path: Path) -> None:
    python = installed.with_name("python")
    assert run(python, "-P", "-m", "cdc_outbox", "--version", cwd=tmp_path).endswith(f", version {__version__}\n")
    assert "init-slot" in run(python, "-P", "-m", "cdc_outbox", "--help", cwd=tmp_path)


def test_an_application_is_checked_against_the_types_that_come_with_the_wheel(installed: Path, tmp_path: Path) -> None:
    program = tmp_path / "application.py"
    program.write_text(APPLICATION)
    check: list[str | Path] = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache"]
    check += ["--python-executable", installed.with_name("python")]
    assert "no issues found" in run(*check, program, cwd=tmp_path)
    wrong = program.with_name("wrong.py")
    wrong.write_text(APPLICATION.replace('"send_receipt"', "42").replace("headers=", "header="))
    done = subprocess.run(list(map(str, [*check, wrong])), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert 'incompatible type "int"; expected "str"' in done.stdout
    assert 'Unexpected keyword argument "header"' in done.stdout


APPLICATION = """
import psycopg

from cdc_outbox import Inbox, Job, stage_many

def order(connection: psycopg.Connection) -> list[int]:
    with connection.transaction():
        return stage_many(connection, [Job("send_receipt", {"order": 42}, headers={"tenant": "a"})])

async def work(connection: psycopg.AsyncConnection, inbox: Inbox, message: object) -> bool:
    async with connection.transaction():
        return await inbox.once(connection, message)
"""


def test_the_source_distribution_holds_what_is_in_the_repository_and_nothing_else(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    root, names = f"cdc_outbox-{__version__}/", set()
    for member in members:
        assert member.name.startswith(root)
        assert member.isfile(), f"{member.name} is no plain file"
        names.add(member.name.removeprefix(root))
    tops = {name.split("/")[0] for name in names}
    folders = {"cdc_outbox", "sql", "tests", "docs", "examples", "benchmarks", "deploy"}
    texts = {"README.md", "README.zh-CN.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "pyproject.toml"}
    assert tops == folders | texts | {"PKG-INFO", "docker-compose.yml", ".gitignore"}
    assert not [name for name in names if name.endswith((".pyc", ".stamp", ".log")) or "/results/" in name]
    assert {name for name in names if name.startswith("sql/")} == {f"sql/{file}" for file in SQL}
    assert sum(member.size for member in members) < 8e6


def test_the_source_distribution_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "tarfile", "--extract", sdist, tmp_path, cwd=tmp_path)
    source = tmp_path / f"cdc_outbox-{__version__}"
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "dist", cwd=source)
    (second,) = (tmp_path / "dist").glob("*.whl")
    assert second.name == wheel.name
    assert contents(second) == contents(wheel)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_an_index_would_take_both(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    assert run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, cwd=tmp_path).count("PASSED") == 2
