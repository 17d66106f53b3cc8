"""What the documents point to is there: tests, files, commands of make."""

import ast
import re
from pathlib import Path

import pytest

from cdc_outbox import __version__

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_its_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
    inside = [link for link in links if "://" not in link]
    assert [link for link in inside if not (document.parent / link).exists()] == []


def test_each_test_that_the_design_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", DESIGN)
    missing = []
    for file, name in named:
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        if name not in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}:
            missing.append(f"{file}::{name}")
    assert missing == []


@pytest.mark.parametrize("part", ["visibility gate", "in-flight ledger", "checkpoint guard", "fence purge"])
def test_each_part_of_the_design_has_what_goes_wrong_without_it_and_a_test(part: str) -> None:
    (section,) = re.findall(rf"^## The {part}\n(.*?)^## ", DESIGN, re.MULTILINE | re.DOTALL)
    assert "**Without it**" in section
    assert "**What it does.**" in section
    assert section.count(".py::test_") > 1


def test_each_make_command_that_they_name_has_a_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {name for path in DOCUMENTS for name in re.findall(r"\bmake ([\w-]+)`?", _code(path))}
    assert named >= {"test", "lint", "dist"}
    assert {name for name in named if f"\n{name}:" not in makefile} == set()


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (first, *_) = re.findall(r"^## \[([^\]]+)\] - (\d{4}-\d\d-\d\d|unreleased)$", text, re.MULTILINE)
    assert first[0] == __version__
    kinds = set(re.findall(r"^### (\w+)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def _code(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return "\n".join([*re.findall(r"```sh\n(.*?)```", text, re.DOTALL), *re.findall(r"`[^`\n]+`", text)])
