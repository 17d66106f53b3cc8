"""The options of the commands, each with its variable, its key in the configuration file and its type."""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import click

from cdc_outbox import config
from cdc_outbox.clients import table_name
from cdc_outbox.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """`500ms`, `10s`, `5m`; with `off=True` the word `off` too, which is None; with `above_zero` not 0."""

    name = "duration"

    def __init__(self, *, off: bool = False, above_zero: bool = False) -> None:
        self.off = off
        self.above_zero = above_zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value  # converted already
        if self.off and value == "off":
            return "off"
        try:
            found = config.seconds(value)
        except ValueError as error:
            self.fail(f"{error}{' or `off`' if self.off else ''}", param, ctx)
        if self.above_zero and found == 0:
            self.fail("give a duration above 0", param, ctx)
        return found


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


class InboxTable(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """A name that `Inbox` takes, which knows no client library's way of quoting."""

    name = "table"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return table_name(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Role(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """The name of a role of Postgres, as it is, without quotes."""

    name = "role"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not 0 < len(str(value).encode(errors="replace")) <= config.LONGEST_IDENTIFIER_BYTES:
            self.fail(f"give a role's name, of {config.LONGEST_IDENTIFIER_BYTES} bytes at most", param, ctx)
        return str(value)


class Pair(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """`NAME=VALUE`. In a variable the next one begins where a NAME= does, so that a password may hold spaces."""

    name = "pair"

    def split_envvar_value(self, rv: str) -> list[str]:
        return re.split(r"\s+(?=[\w.-]+=)", rv.strip())


def pairs(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """`NAME=VALUE`, repeatable; a table in the configuration file; in a variable, several are separated by spaces."""
    found: dict[str, str] = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name.strip():
            # Of it only what cannot be a password.
            property_name = re.match(r"[a-z]+(\.[a-z]+)+", name)
            quoted = f"{property_name[0]!r}… is" if property_name else "one is"
            raise click.BadParameter(f"{quoted} not NAME=VALUE", ctx, param)
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
    known = named_options(ctx.command)
    whole = ctx.find_root().command
    assert isinstance(whole, click.Group)
    every = {name for command in commands(whole).values() for name in named_options(command)}
    if unknown := sorted(repr(key) for key in given if key.replace("_", "-") not in every):
        close = [word for key in unknown for word in similar(key.strip("'").replace("_", "-"), every)[:1]]
        raise ConfigError(
            f"--config {path}: unknown key {', '.join(unknown)}",
            f"did you mean {', '.join(map(repr, close))}?"
            if close
            else "a key is an option's name without dashes in front",
        )
    defaults: dict[str, Any] = {}
    for key, value in given.items():
        option = known.get(key.replace("_", "-"))
        if option is None or option.name is None:
            continue  # another command's
        if option.name in defaults:
            raise ConfigError(f"--config {path}: --{key} is given twice")
        try:
            defaults[option.name] = as_typed(option, value)
        except ValueError as error:
            raise ConfigError(f"--config {path}: --{key}: {error}") from None
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def as_typed(option: click.Option, value: Any) -> Any:
    """A TOML value as the command line has it, so that one converter judges both. Raises ValueError, without the
    value: it could be a password."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise ValueError("write true or false")
        return value
    if option.multiple:
        if isinstance(value, Mapping) and isinstance(option.type, Pair):
            return [f"{name}={_text(text)}" for name, text in value.items()]
        return [_text(one) for one in value] if isinstance(value, list) else [_text(value)]
    if isinstance(value, bool):
        raise ValueError("it is no switch: write a value")
    return _text(value)


def _text(value: Any) -> str:
    if isinstance(value, (list, Mapping)):
        raise ValueError("write one value, or see --help for what it takes")
    return str(value).lower() if isinstance(value, bool) else str(value)


def commands(group: click.Group) -> dict[str, click.Command]:
    """By what a person writes, `dead-letters list` for instance."""
    found: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        inner = commands(command) if isinstance(command, click.Group) else {"": command}
        found |= {f"{name} {below}".strip(): leaf for below, leaf in inner.items()}
    return found


def named_options(command: click.Command) -> dict[str, click.Option]:
    """By what a person writes, without dashes in front."""
    return {
        text.lstrip("-"): parameter
        for parameter in command.params
        for text in parameter.opts
        if text.startswith("--") and isinstance(parameter, click.Option) and parameter.name != "config"
    }


def option(*names: str, envvar: str | list[str] | None = None, **more: Any) -> Callable[[Command], Command]:
    """An option with its variable: CDC_OUTBOX_ and the option's name, shown in --help."""
    long = next(name for name in names if name.startswith("--")).split("/")[0]
    variable = "CDC_OUTBOX_" + long.removeprefix("--").replace("-", "_").upper()
    more.setdefault("show_default", True)
    return click.option(*names, envvar=envvar or variable, show_envvar=True, **more)


def pair_option(*names: str, **more: Any) -> Callable[[Command], Command]:
    """NAME=VALUE, repeatable, which becomes a dict."""
    return option(*names, type=Pair(), multiple=True, callback=pairs, **more)


def examples(*lines: str) -> str:
    """What stands below a command's help; each line is one that a shell takes."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def grouped(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for add in reversed(options):
            command = add(command)
        return command

    return decorate


class ShardType(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """`1/3`."""

    name = "shard"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> config.Shard:
        try:
            return value if isinstance(value, config.Shard) else config.Shard.parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


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
    option(
        "--shard",
        type=ShardType(),
        metavar="I/N",
        help="Of N slots that share the table by key, the I-th; its slot and publication are called …_I_of_N.",
    ),
    option("--log-format", type=click.Choice(["text", "json"]), default="text", help="What log lines look like."),
    option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        help="The least that is logged.",
    ),
)

column_map = pair_option(
    "--column",
    "columns",
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

librdkafka = pair_option(
    "--property",
    "-X",
    "properties",
    metavar="NAME=VALUE",
    show_default=False,
    help="Any property of librdkafka that breaks no promise; repeatable.",
)

record = grouped(
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
    pair_option(
        "--header",
        "headers",
        metavar="NAME=COLUMN",
        help="A column that becomes a header too; repeatable.",
    ),
)
"""What is produced."""

producing = grouped(brokers, record, librdkafka)

deleting = grouped(
    option("--purge-batch", type=int, default=5000, help="Rows in one DELETE, which is a transaction of its own."),
    option("--archive", is_flag=True, help="Move relayed rows to the archive instead of deleting them."),
    option(
        "--archive-retain",
        type=Duration(above_zero=True),
        help="How long rows stay in the archive; otherwise for good.",
    ),
)

inbox_table = option(
    "--inbox", type=InboxTable(), default="inbox", help="The worker's table, with its schema if need be."
)

choosing = grouped(
    option("--id", "ids", multiple=True, help="The row with this id; repeatable."),
    option("--task", "tasks", multiple=True, help="The rows of this task; repeatable."),
)


def _texts(value: object) -> list[str]:
    if isinstance(value, Mapping):
        return [*map(str, value), *map(str, value.values())]
    return [value] if isinstance(value, str) else list(value) if isinstance(value, tuple) else []


def _is_text(text: str) -> bool:
    """Neither libpq nor librdkafka has a way to take anything else; half of a surrogate pair kills the process."""
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def similar(word: str, words: Collection[str]) -> list[str]:
    """At most two, the most similar first."""
    import difflib

    return difflib.get_close_matches(word, words, n=2)


def meant(word: str, words: Collection[str]) -> str:
    """`. Did you mean …?`, or what there is."""
    close = similar(word, words)
    if close:
        return f". Did you mean {' or '.join(map(repr, close))}?"
    return f"; there are {', '.join(words)}"


class Strict(click.Command):
    """No arguments, only options. What is given all the same is not quoted: it could be a DSN."""

    allow_extra_args = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        if ctx.resilient_parsing:
            return rest
        if rest:
            raise click.UsageError("something here is no option (a DSN stands behind --dsn)", ctx)
        for parameter in self.params:
            if not all(map(_is_text, _texts(ctx.params.get(parameter.name or "")))):
                raise click.BadParameter("it is not UTF-8, or has a zero character in it", ctx, parameter)
        return rest


class Commands(click.Group):
    command_class = Strict

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and not ctx.resilient_parsing:
            # Else not quoted: it could be a DSN.
            name = f" {args[0]!r}" if re.fullmatch(r"[a-z-]{1,20}", args[0]) else ""
            raise click.UsageError(f"no such command{name}{meant(args[0], self.commands)}", ctx)
        return super().resolve_command(ctx, args)
