"""What a user installs: the wheel, built, installed into an environment of its own and run from another folder."""

import os
import subprocess
import sys
import sysconfig
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with what is installed: no network."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (found,) = folder.glob("*.whl")
    return found


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
