"""The tables of both READMEs that are made from the code. `python -m tests.readme_tables` writes them.

The Chinese one says the same: names stand as they are, and each text is in tests/readme_zh.toml. A text that is missing
there stays English, and the test of the READMEs says so.
"""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import click

from cdc_outbox import metrics
from cdc_outbox.cli import cli
from cdc_outbox.exposition import RelayCollector
from cdc_outbox.options import commands

ROOT = Path(__file__).parent.parent
MARKED = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
CHINESE: dict[str, str] = tomllib.loads((ROOT / "tests/readme_zh.toml").read_text(encoding="utf-8"))["texts"]

Say = Callable[[str], str]
"""A text of the code, in the language of the README."""


def english(text: str) -> str:
    return text


def chinese(text: str) -> str:
    return CHINESE.get(text, text)


READMES: dict[Path, Say] = {ROOT / "README.md": english, ROOT / "README.zh-CN.md": chinese}


def options_table(say: Say) -> list[list[str]]:
    """One row an option; the commands that share it are named together."""
    rows: dict[tuple[str, ...], list[str]] = {}
    leaves = commands(cli)
    for name, command in leaves.items():
        for option in command.params:
            if isinstance(option, click.Option):
                rows.setdefault(option_row(option, say), []).append(f"`{name}`")
    everyone = len(leaves.keys() - {"demo", "completion"})
    head = [say("option"), say("variable"), say("default"), "", say("commands")]
    return [head, *([*row, say("all") if len(users) == everyone else ", ".join(users)] for row, users in rows.items())]


def option_row(option: click.Option, say: Say) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in sorted(option.opts, key=len))
    variables = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or [])
    return names, ", ".join(f"`{name}`" for name in variables), default(option, say), say(option.help or "")


def default(option: click.Option, say: Say) -> str:
    value = option.default
    if option.name == "dsn":
        return say(str(option.show_default))
    if isinstance(option.type, click.Choice):  # the default first, where there is one: versions of click differ
        return f" {say('or')} ".join(f"`{choice}`" for choice in sorted(option.type.choices, key=lambda c: c != value))
    if option.is_flag or option.multiple or value == "" or not isinstance(value, str | int):
        return ""
    return f"`{value}`"


def metrics_table(say: Say) -> list[list[str]]:
    rows = [[say("metric"), say("type"), ""]]
    for family in RelayCollector(metrics.Figures("slot")).collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"slot_name", "le"})
        shown = f"{name}{{{','.join(labels)}}}" if labels else name
        rows.append([f"`{shown}`", family.type, say(family.documentation)])
    return rows


TABLES = {"options": options_table, "metrics": metrics_table}


def as_markdown(rows: list[list[str]]) -> str:
    head, *body = rows
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in (head, ["---"] * len(head), *body))


def with_tables(text: str, say: Say) -> str:
    return MARKED.sub(
        lambda found: f"<!-- table: {found[1]} -->\n{as_markdown(TABLES[found[1]](say))}\n<!-- end -->", text
    )


def untranslated() -> set[str]:
    """Texts of the code that the Chinese README would have to say in English."""
    missing: set[str] = set()

    def ask(text: str) -> str:
        if text and text not in CHINESE:
            missing.add(text)
        return text

    for table in TABLES.values():
        table(ask)
    return missing


if __name__ == "__main__":
    for readme, say in READMES.items():
        readme.write_text(with_tables(readme.read_text(encoding="utf-8"), say), encoding="utf-8")
    for text in sorted(untranslated()):
        print(f"not in tests/readme_zh.toml: {text}")
