"""Which module may import what. Read from the sources, so that an import inside a function counts too; and, at the end,
what a command really imports, since every library makes somebody wait."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "cdc_outbox"
PURE = {"lsn", "errors", "walsender", "pgoutput", "event", "inflight", "visibility", "backoff"}
# The demo stands outside: its servers, and its application and worker (story). `verify` plays both too (scratch).
DEMO = {"embedded", "demo", "story"}
ONLY = {
    "confluent_kafka": {"kafka", "kafka_topic", "scratch", "scratch_worker"} | DEMO,
    "psycopg": {"conninfo", "query", "replication", "statements", "scratch"} | DEMO,
    "click": {"cli", "options"},
    "prometheus_client": {"exposition"},
    "cdc_outbox.cli": {"__main__"},
}


def imports(path: Path) -> set[str]:
    """Dotted names of modules, the package's own written in full."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, ["cdc_outbox" if node.level else "", node.module]))
            submodules = {f"{module}.{alias.name}" for alias in node.names} if module == "cdc_outbox" else set()
            found |= {module} | submodules
    return found


IMPORTS = {path.stem: imports(path) for path in PACKAGE.glob("*.py")}


def test_the_rules_speak_of_modules_that_exist() -> None:
    named = PURE.union(*ONLY.values()) - DEMO
    assert named <= IMPORTS.keys()


@pytest.mark.parametrize("module", sorted(PURE))
def test_a_pure_module_imports_the_standard_library_and_its_like_only(module: str) -> None:
    allowed = {f"cdc_outbox.{other}" for other in PURE}
    foreign = {
        name for name in IMPORTS[module] if name.split(".")[0] not in sys.stdlib_module_names and name not in allowed
    }
    assert foreign == set()


@pytest.mark.parametrize("module", sorted(PURE))
def test_a_pure_module_does_no_input_or_output(module: str) -> None:
    assert not IMPORTS[module] & {"socket", "select", "subprocess", "threading", "asyncio", "os", "pathlib", "logging"}


@pytest.mark.parametrize("library", sorted(ONLY))
def test_each_library_has_its_only_importers(library: str) -> None:
    importers = {
        module
        for module, names in IMPORTS.items()
        if any(name == library or name.startswith(f"{library}.") for name in names)
    }
    assert importers <= ONLY[library]
    assert importers


def test_nothing_of_the_package_imports_its_tests() -> None:
    assert not any(name.split(".")[0] == "tests" for names in IMPORTS.values() for name in names)


SLOW = {"psycopg", "confluent_kafka", "prometheus_client", "asyncio", "http.server", "ssl"}
OF_OTHER_COMMANDS = {"setup", "doctor", "status", "verify", "demo", "embedded", "checks_kafka"}


def imported_by(*args: str) -> set[str]:
    """All that a run of the command imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "cdc_outbox", *args], capture_output=True, text=True, timeout=60
    )
    found = set(re.findall(r"^import time: .*\| +(\S+)$", done.stderr, re.MULTILINE))
    assert "cdc_outbox.cli" in found, done.stderr[-500:]
    return found


@pytest.mark.parametrize("args", [["--help"], ["stream", "--help"], ["init-slot", "--help"], ["nonsense"]])
def test_help_waits_for_no_library(args: list[str]) -> None:
    assert not imported_by(*args) & SLOW


def test_stream_imports_what_it_needs_to_start_and_no_more() -> None:
    refused = "host=127.0.0.1 port=1 dbname=none user=none"
    found = imported_by("stream", "--dsn", refused, "-b", "127.0.0.1:1", "--metrics-address", "127.0.0.1:0")
    assert {"cdc_outbox.session", "cdc_outbox.kafka", "cdc_outbox.http"} <= found
    assert not found & {"prometheus_client", *(f"cdc_outbox.{module}" for module in OF_OTHER_COMMANDS)}


@pytest.mark.parametrize("command", ["status", "purge", "init-slot", "replay --dry-run"])
def test_what_speaks_to_postgres_only_waits_for_no_kafka_client(command: str) -> None:
    found = imported_by(*command.split(), "--dsn", "host=127.0.0.1 port=1 dbname=none user=none")
    assert "psycopg" in found
    assert not found & {"confluent_kafka", "prometheus_client", "http.server"}
