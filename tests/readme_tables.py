"""The tables of the README that are made from the code. `python -m tests.readme_tables` writes them."""

import re
from pathlib import Path

import click

from cdc_outbox.cli import cli
from cdc_outbox.exposition import RelayCollector
from cdc_outbox.metrics import Figures
from cdc_outbox.options import commands

README = Path(__file__).parent.parent / "README.md"
MARKED = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def options_table() -> str:
    """One row an option; the commands that share it are named together."""
    rows: dict[str, list[str]] = {}
    leaves = commands(cli)
    for name, command in leaves.items():
        for option in command.params:
            if isinstance(option, click.Option):
                rows.setdefault(option_row(option), []).append(f"`{name}`")
    lines = ["| option | variable | default | | commands |", "|---|---|---|---|---|"]
    everyone = len(leaves.keys() - {"demo"})
    for row, users in rows.items():
        lines.append(f"{row} {'all' if len(users) == everyone else ', '.join(users)} |")
    return "\n".join(lines)


def option_row(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in sorted(option.opts, key=len))
    variables = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or [])
    default = option.default
    shown = "" if option.is_flag or option.multiple or not isinstance(default, str | int) else f"`{default}`"
    if option.name == "dsn":
        shown = str(option.show_default)
    if isinstance(option.type, click.Choice):
        shown = " or ".join(f"`{choice}`" for choice in (default, *(c for c in option.type.choices if c != default)))
    return f"| {names} | {', '.join(f'`{name}`' for name in variables)} | {shown.replace('``', '')} | {option.help} |"


def metrics_table() -> str:
    lines = ["| metric | type | |", "|---|---|---|"]
    for family in RelayCollector(Figures("slot")).collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"slot_name", "le"})
        shown = f"{name}{{{','.join(labels)}}}" if labels else name
        lines.append(f"| `{shown}` | {family.type} | {family.documentation} |")
    return "\n".join(lines)


TABLES = {"options": options_table, "metrics": metrics_table}


def with_tables(text: str) -> str:
    return MARKED.sub(lambda found: f"<!-- table: {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->", text)


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
