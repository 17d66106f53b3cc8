"""Which module may import what. Read from the sources, so that an import inside a function counts too."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "cdc_outbox"
PURE = {"lsn", "errors", "walsender", "pgoutput", "event", "inflight", "visibility", "backoff"}
# The demo stands outside: its servers, and its application and worker (story). `verify` plays both too (scratch).
DEMO = {"embedded", "demo", "story"}
ONLY = {
    "confluent_kafka": {"kafka", "kafka_topic", "scratch", "scratch_worker"} | DEMO,
    "psycopg": {"query", "replication", "statements", "scratch"} | DEMO,
    "click": {"cli", "options"},
    "prometheus_client": {"metrics", "http"},
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
