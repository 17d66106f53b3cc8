"""The unit of systemd, by systemd's own tools."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cdc_outbox import errors
from cdc_outbox.config import Settings
from cdc_outbox.errors import OutboxError
from tests.fix_command import EXECUTABLE

UNIT = Path(__file__).parents[2] / "deploy" / "cdc-outbox.service"
MOST_EXPOSURE = 2.0
"""Of 10, which is a service that may do anything."""


def setting(name: str) -> str:
    found: list[str] = re.findall(rf"^{name}=(.*)$", UNIT.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(found) == 1, name
    return found[0]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit, for a command that is installed here: `verify` looks for it."""
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text(encoding="utf-8").replace(setting("ExecStart").split()[0], str(EXECUTABLE)))
    return path


def analyze(*arguments: str | Path) -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("`systemd-analyze` is not installed (Debian package systemd)")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_systemd_has_nothing_to_say_of_the_unit(installed: Path) -> None:
    assert analyze("verify", installed) == ""


def test_the_service_may_do_little(installed: Path) -> None:
    said = analyze("security", "--offline=true", f"--threshold={MOST_EXPOSURE * 10:.0f}", installed)
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", said)
    assert exposure is not None
    assert float(exposure[1]) < MOST_EXPOSURE


def test_it_has_time_to_drain() -> None:
    assert float(setting("TimeoutStopSec")) > Settings(dsn="").shutdown_timeout


def test_it_is_not_started_again_where_only_an_operator_can_mend_it() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OutboxError)]
    codes = {int(code) for code in setting("RestartPreventExitStatus").split()}
    assert codes == {errors.ConfigError.exit_code, errors.GapError.exit_code, errors.RecordRefused.exit_code}
    assert codes < {kind.exit_code for kind in kinds}
