"""The options of the commands, each with its variable, its key in the configuration file and its type."""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import click

from cdc_outbox import config
from cdc_outbox.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """`500ms`, `10s`, `5m`; with `off=True` the word `off` too, which is None."""

    name = "duration"

    def __init__(self, *, off: bool = False) -> None:
        self.off = off

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return float(value) if isinstance(value, int) else value
        if self.off and value == "off":
            return "off"
        try:
            return config.seconds(value)
        except ValueError as error:
            self.fail(f"{error}{' or `off`' if self.off else ''}", param, ctx)


class Moment(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """`2h`, which is two hours ago, or a time in ISO 8601, local if it has no offset. Becomes ISO 8601."""

    name = "moment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        with contextlib.suppress(ValueError):
            return (datetime.now(UTC) - timedelta(seconds=config.seconds(str(value)))).isoformat()
        try:
            return datetime.fromisoformat(str(value)).astimezone().isoformat()
        except ValueError:
            self.fail(f"{value!r} is neither a duration such as 2h nor a time in ISO 8601", param, ctx)


def pairs(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """`NAME=VALUE`, repeatable; a table in the configuration file; in a variable, several are separated by spaces."""
    found: dict[str, str] = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name.strip():
            # Not the whole: it could be a password.
            raise click.BadParameter(f"{re.match(r'[a-z._]*', name)[0]!r}… is not NAME=VALUE", ctx, param)  # type: ignore[index]
        if name.strip() in found:
            raise click.BadParameter(f"{name.strip()} is given twice", ctx, param)
        found[name.strip()] = text
    return found


def read_config(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    """Values of the file become the defaults of the options: an option or a variable still wins."""
    if path is None:
        return
    try:
        given = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        # Not the parser's own words: they could quote a password.
        raise ConfigError(f"--config {path}: not valid TOML") from None
    known = option_names(ctx.command)
    whole = ctx.find_root().command
    assert isinstance(whole, click.Group)
    every = {name for command in commands(whole).values() for name in option_names(command)}
    if unknown := sorted(repr(key) for key in given if key.replace("_", "-") not in every):
        raise ConfigError(f"--config {path}: unknown key {', '.join(unknown)}")
    defaults: dict[str, Any] = {}
    for key, value in given.items():
        name = known.get(key.replace("_", "-"))
        if name is None:
            continue  # another command's
        if isinstance(value, Mapping):
            value = [f"{name}={text}" for name, text in value.items()]
        defaults[name] = value
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def commands(group: click.Group) -> dict[str, click.Command]:
    """By what a person writes, `dead-letters list` for instance."""
    found: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        inner = commands(command) if isinstance(command, click.Group) else {"": command}
        found |= {f"{name} {below}".strip(): leaf for below, leaf in inner.items()}
    return found


def option_names(command: click.Command) -> dict[str, str]:
    """What a person writes, without dashes in front, and what click calls it."""
    return {
        text.lstrip("-"): parameter.name
        for parameter in command.params
        for text in parameter.opts
        if text.startswith("--") and parameter.name and parameter.name != "config"
    }


def option(*names: str, envvar: str | list[str] | None = None, **more: Any) -> Callable[[Command], Command]:
    """An option with its variable: CDC_OUTBOX_ and the option's name, shown in --help."""
    long = next(name for name in names if name.startswith("--")).split("/")[0]
    variable = "CDC_OUTBOX_" + long.removeprefix("--").replace("-", "_").upper()
    more.setdefault("show_default", True)
    return click.option(*names, envvar=envvar or variable, show_envvar=True, **more)


def grouped(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for add in reversed(options):
            command = add(command)
        return command

    return decorate


common = grouped(
    click.option(
        "--config",
        type=click.Path(),
        envvar="CDC_OUTBOX_CONFIG",
        show_envvar=True,
        is_eager=True,
        expose_value=False,
        callback=read_config,
        help="A TOML file; its keys are the options' names.",
    ),
    option(
        "--dsn",
        "-d",
        envvar=["CDC_OUTBOX_DSN", "DATABASE_URL"],
        default="",
        show_default="libpq's PG* variables",
        help="Postgres, as a URI or key=value pairs.",
    ),
    option("--table", default="outbox", help="The outbox table, with its schema if it is not in the search_path."),
    option("--slot", default="cdc_outbox", help="The replication slot."),
    option("--publication", default="cdc_outbox", help="The publication."),
    option("--log-format", type=click.Choice(["text", "json"]), default="text", help="What log lines look like."),
    option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        help="The least that is logged.",
    ),
)

column_map = option(
    "--column",
    "columns",
    multiple=True,
    callback=pairs,
    metavar="ROLE=NAME",
    help="A column of another name for a role (id, task, args, key, headers); repeatable.",
)

brokers = option(
    "--bootstrap-servers",
    "-b",
    envvar=["CDC_OUTBOX_BOOTSTRAP_SERVERS", "KAFKA_BOOTSTRAP_SERVERS"],
    default="",
    help="Kafka brokers to begin with, HOST:PORT[,HOST:PORT…].",
)

librdkafka = option(
    "--property",
    "-X",
    "properties",
    multiple=True,
    callback=pairs,
    metavar="NAME=VALUE",
    show_default=False,
    help="Any property of librdkafka that breaks no promise; repeatable.",
)

producing = grouped(
    brokers,
    option(
        "--topic",
        "-t",
        default="outbox",
        help="The topic; {task} or another column's name in braces is filled in.",
    ),
    column_map,
    option(
        "--format",
        "record_format",
        type=click.Choice(["plain", "cloudevents"]),
        default="plain",
        help="The record's headers.",
    ),
    option("--source", default="/cdc-outbox", help="ce_source of CloudEvents."),
    option(
        "--header",
        "headers",
        multiple=True,
        callback=pairs,
        metavar="NAME=COLUMN",
        help="A column that becomes a header too; repeatable.",
    ),
    librdkafka,
)
"""What is produced, and where to."""

deleting = grouped(
    option("--purge-batch", type=int, default=5000, help="Rows in one DELETE, which is a transaction of its own."),
    option("--archive", is_flag=True, help="Move relayed rows to the archive instead of deleting them."),
    option("--archive-retain", type=Duration(), help="How long rows stay in the archive; otherwise for good."),
)

inbox_table = option("--inbox", default="inbox", help="The worker's table, with its schema if need be.")

choosing = grouped(
    option("--id", "ids", multiple=True, help="The row with this id; repeatable."),
    option("--task", "tasks", multiple=True, help="The rows of this task; repeatable."),
)


class Strict(click.Command):
    """No arguments, only options. What is given all the same is not quoted: it could be a DSN."""

    allow_extra_args = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        if rest and not ctx.resilient_parsing:
            raise click.UsageError("something here is no option (a DSN stands behind --dsn)", ctx)
        return rest


class Commands(click.Group):
    command_class = Strict

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and not ctx.resilient_parsing:
            name = f" {args[0]!r}" if re.fullmatch(r"[a-z-]{1,20}", args[0]) else ""
            raise click.UsageError(f"no such command{name}; there are {', '.join(self.commands)}", ctx)
        return super().resolve_command(ctx, args)
