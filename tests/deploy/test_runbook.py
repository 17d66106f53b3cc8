"""docs/runbook.md has a section for each thing that may wake somebody, and what it tells them to type is right."""

import re
import shlex
from pathlib import Path

import click
import pytest

from cdc_outbox import errors
from cdc_outbox.cli import cli
from cdc_outbox.errors import OutboxError
from cdc_outbox.options import commands

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
SECTIONS = set(re.findall(r"^### (.+)$", TEXT, re.MULTILINE))
ALERTS = set(re.findall(r"- alert: (\w+)", (ROOT / "deploy/prometheus/cdc-outbox.rules.yml").read_text("utf-8")))


def typed() -> list[str]:
    """Every command of ours, whether in a block or in a sentence."""
    blocks = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    sentences = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))
    found = [re.search(r"(?:^|-- )cdc-outbox (.+)", line) for line in (*lines, *sentences)]
    return sorted({match[1] for match in found if match})


def test_each_alert_and_each_exit_code_has_its_section_and_no_section_is_left_over() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OutboxError)]
    assert ALERTS | {f"Exit code {kind.exit_code}" for kind in kinds} == SECTIONS


def test_the_alerts_that_it_mentions_exist() -> None:
    assert set(re.findall(r"\bCdcOutbox\w+", TEXT)) == ALERTS


def test_there_is_something_to_type_in_each_section_but_of_a_good_end() -> None:
    sections = re.split(r"^### ", TEXT, flags=re.MULTILINE)[1:]
    silent = {section.splitlines()[0] for section in sections if "```" not in section}
    assert silent == {"Exit code 0"}


@pytest.mark.parametrize("line", typed())
def test_each_command_in_it_parses(line: str) -> None:
    words = shlex.split(line, comments=True)
    name = next(name for name in commands(cli) if words[: len(name.split())] == name.split())
    arguments = words[len(name.split()) :]
    if "--help" in arguments:
        arguments.remove("--help")
    with commands(cli)[name].make_context(name, arguments) as context:
        assert isinstance(context, click.Context)


def test_it_names_many_commands() -> None:
    assert len(typed()) > 10
