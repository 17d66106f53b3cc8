"""The commands. The only module that imports click; nothing imports it."""

from __future__ import annotations

import gc
import logging
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from cdc_outbox import __version__, config, logs
from cdc_outbox.config import Settings
from cdc_outbox.doctor import examine, failed, findings_as_json
from cdc_outbox.errors import ConfigError, OutboxError, PreconditionError, Stopped
from cdc_outbox.http import MetricsServer
from cdc_outbox.metrics import Figures
from cdc_outbox.purge import Purge, PurgeThread
from cdc_outbox.query import complete_conninfo
from cdc_outbox.relay import Relay
from cdc_outbox.setup import Setup, drop, left_behind
from cdc_outbox.slot_watch import SlotWatch
from cdc_outbox.status import look
from cdc_outbox.status_report import Status
from cdc_outbox.status_text import lines
from cdc_outbox.wakeup import Wakeup

log = logging.getLogger("cdc_outbox")
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
    every = {name for command in cli.commands.values() for name in option_names(command)}
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

producing = grouped(
    option(
        "--bootstrap-servers",
        "-b",
        envvar=["CDC_OUTBOX_BOOTSTRAP_SERVERS", "KAFKA_BOOTSTRAP_SERVERS"],
        default="",
        help="Kafka brokers to begin with, HOST:PORT[,HOST:PORT…].",
    ),
    option(
        "--topic",
        "-t",
        default="outbox",
        help="The topic; {task} or another column's name in braces is filled in.",
    ),
    option(
        "--column",
        "columns",
        multiple=True,
        callback=pairs,
        metavar="ROLE=NAME",
        help="A column of another name for a role (id, task, args, key, headers); repeatable.",
    ),
    option(
        "--format",
        "record_format",
        type=click.Choice(["plain", "cloudevents"]),
        default="plain",
        help="The record's headers.",
    ),
    option("--source", default="/cdc-outbox", help="ce_source of CloudEvents."),
    option(
        "--property",
        "-X",
        "properties",
        multiple=True,
        callback=pairs,
        metavar="NAME=VALUE",
        show_default=False,
        help="Any property of librdkafka that breaks no promise; repeatable.",
    ),
)
"""What is produced, and where to."""


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


@click.group(
    cls=Commands,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="cdc-outbox")
def cli() -> None:
    """Relays rows of an outbox table from Postgres's WAL to Kafka: committed rows, all of them, and nothing else."""


@cli.command("init-slot")
@common
@option("--dry-run", is_flag=True, help="Print the SQL instead of executing it.")
@option("--failover", is_flag=True, help="A slot that standbys keep too (PostgreSQL 17 and later).")
@option("--wait", type=Duration(), default="60s", help="The longest wait for older transactions.")
@option("--app-role", help="Let this role insert jobs, and nothing else.")
@option("--relay-role", help="Let this role do what the relay needs, and nothing else.")
@option("--json", "as_json", is_flag=True, help="Report as JSON.")
def init_slot(
    dry_run: bool,
    failover: bool,
    wait: float,
    app_role: str | None,
    relay_role: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Make table, publication, slot and checkpoint, or mend them; also the way back after a lost slot.

    Idempotent. Rows that are in the table already, and that the slot does not carry, go through it again.
    """
    settings = database_settings(given)
    with Wakeup() as wakeup:
        setup = Setup(
            settings,
            wakeup,
            dry_run=dry_run,
            failover=failover,
            wait_seconds=wait,
            app_role=app_role,
            relay_role=relay_role,
            say=(lambda line: None) if as_json or dry_run else click.echo,
            warn=log.info,
        )
        report = setup.run()
    if dry_run:
        for statement in report.sql:
            click.echo(f"{statement};\n")
    elif as_json:
        click.echo(report.as_json())


@cli.command("drop-slot")
@common
@option("--yes", is_flag=True, help="Do not ask.")
def drop_slot(yes: bool, **given: Any) -> None:
    """Drop the slot and its checkpoint; table, publication and rows stay."""
    settings = database_settings(given)
    with Wakeup() as wakeup:
        found = left_behind(settings, wakeup)
    for line in found.lines():
        click.echo(line)
    if not found.exists:
        return
    if not yes:
        try:
            click.confirm("Drop it?", abort=True)
        except click.Abort:
            click.echo("nothing was dropped")
            return
    with Wakeup() as wakeup:
        drop(settings, wakeup)
    click.echo(f"slot {settings.slot} dropped; `cdc-outbox init-slot` makes a new one and sends what is in the table")


@cli.command()
@common
@producing
@option(
    "--on-poison",
    type=click.Choice(["halt", "dead-letter"]),
    default="halt",
    help="What to do with a record that Kafka will never take.",
)
@option(
    "--on-gap",
    type=click.Choice(["halt", "recover"]),
    default="halt",
    help="When rows may be missing from the slot: stop, or do what init-slot would.",
)
@option(
    "--purge-every",
    type=Duration(off=True),
    default="5s",
    help="How often relayed rows are deleted, or `off`.",
)
@option("--purge-batch", type=int, default=5000, help="Rows in one DELETE.")
@option(
    "--check-every",
    type=Duration(),
    default="60s",
    help="How often to check that the slot still covers the table.",
)
@option("--shutdown-timeout", type=Duration(), default="10s", help="The longest a drain may take.")
@option("--no-wait", is_flag=True, help="Exit 6 instead of standing by while another relay holds the slot.")
@option("--until-caught-up", is_flag=True, help="Stop at the WAL position of the start.")
@option("--endpos", metavar="LSN", help="Stop at this WAL position.")
@option(
    "--metrics-address",
    default="127.0.0.1:9187",
    help="HOST:PORT for /metrics, /healthz and /readyz, or `off`.",
)
@option("--stalled-after", type=Duration(), default="30s", help="How long pending work may stand still for /readyz.")
def stream(record_format: str, **given: Any) -> None:
    """Relay committed rows to Kafka until stopped; stand by while another relay holds the slot."""
    given["purge_every"] = None if given["purge_every"] == "off" else given["purge_every"]
    given["metrics_address"] = None if given["metrics_address"] == "off" else given["metrics_address"]
    settings = database_settings({**given, "cloudevents": record_format == "cloudevents"}, streaming=True)
    figures = Figures(settings.slot)
    with Wakeup() as wakeup:
        relay = Relay(
            settings,
            wakeup,
            figures,
            recover=(lambda: recover(settings, wakeup)) if settings.on_gap == "recover" else None,
        )
        # Bound before the slot is touched: a port in use must not cost anybody the slot.
        server = watch = None
        if settings.metrics_address is not None:
            watch = SlotWatch(settings)
            server = MetricsServer(settings.metrics_address, figures, watch.reading, settings.stalled_after)
            log.info("metrics on port %d", server.port)
        purging = None
        if settings.purge_every is not None:
            purging = PurgeThread(lambda own: new_purge(settings, own), settings.purge_every, figures, relay.fail)
            relay.relayed = purging.relayed
        # The loop makes no cycles, but many small objects: by default the collector walks all that was ever imported
        # again and again (6 % of the main thread's time at one row a transaction, 2 % so).
        gc.freeze()
        gc.set_threshold(10_000)
        try:
            relay.run()
            log.info("stopped; %d rows relayed", figures.relayed_rows)
        finally:
            if purging is not None:
                purging.close()
            if server is not None and watch is not None:
                server.close()
                watch.close()


@cli.command()
@common
@option("--every", type=Duration(), help="Go on, with a round this often; otherwise one round.")
@option("--purge-batch", type=int, default=5000, help="Rows in one DELETE.")
@option("--dry-run", is_flag=True, help="Count what would be deleted.")
def purge(every: float | None, dry_run: bool, **given: Any) -> None:
    """Delete relayed rows, for those who run it apart from `stream --purge-every off`."""
    settings = database_settings(given)
    with Wakeup() as wakeup:
        purging = new_purge(settings, wakeup)
        try:
            while not wakeup.stop_requested:
                done = purging.round(dry_run=dry_run)
                verb = "would be purged" if dry_run else "purged"
                click.echo(f"{done.deleted} rows {verb}" + ("" if done.reached else "; the slot is not there yet"))
                if every is None:
                    if done.left and done.deleted and not dry_run:
                        continue
                    break
                wakeup.wait((), every)
        finally:
            purging.close()


@cli.command()
@common
@option("--json", "as_json", is_flag=True, help="Report as JSON.")
@option("--watch", type=Duration(), is_flag=False, flag_value="2s", help="Go on, looking this often (2s if bare).")
def status(as_json: bool, watch: float | None, **given: Any) -> None:
    """Slot, lag, WAL held and left, what holds it back, and what waits. Exit 0 whenever it could look."""
    settings = database_settings(given)
    clear = watch is not None and sys.stdout.isatty() and not as_json

    def show(found: Status) -> None:
        if clear:
            click.clear()
        click.echo(found.as_json() if as_json else "\n".join(lines(found)) + ("\n" if watch else ""))

    with Wakeup() as wakeup:
        look(settings, wakeup, watch, show)


@cli.command()
@common
@producing
@option("--json", "as_json", is_flag=True, help="Report as JSON.")
def doctor(record_format: str, as_json: bool, **given: Any) -> None:
    """Check every precondition, and say what mends it; exit 3 if one fails. Kafka's too if a broker is named."""
    given["cloudevents"] = record_format == "cloudevents"
    settings = database_settings(given, streaming=bool(given["bootstrap_servers"]))
    found = []
    with Wakeup() as wakeup:
        for line in examine(settings, wakeup):
            found.append(line)
            if not as_json:
                click.echo(line)
    if as_json:
        click.echo(findings_as_json(found))
    if failed(found):
        sys.exit(PreconditionError.exit_code)


@cli.command()
@click.option("--keep", is_flag=True, help="Leave all running, and say how to look at it.")
def demo(keep: bool) -> None:
    """All of it on an embedded Postgres and an embedded broker: no server, no Docker."""
    from cdc_outbox.demo import run_demo

    run_demo(keep=keep)


def new_purge(settings: Settings, wakeup: Wakeup) -> Purge:
    return Purge(
        complete_conninfo(settings.dsn),
        wakeup,
        table=settings.table,
        slot=settings.slot,
        publication=settings.publication,
        batch=settings.purge_batch,
    )


def recover(settings: Settings, wakeup: Wakeup) -> None:
    Setup(settings, wakeup, say=log.warning, warn=log.warning).run()


def database_settings(given: dict[str, Any], *, streaming: bool = False) -> Settings:
    """Also sets up logging, whose options every command has."""
    logs.set_up(given.pop("log_format"), given.pop("log_level"))
    settings = Settings(**given)
    config.check(settings, streaming=streaming)
    return settings


def fail(error: OutboxError) -> NoReturn:
    """One line that says what is wrong, and what to do next."""
    click.echo(f"error: {error}" + (f"; hint: {error.hint}" if error.hint else ""), err=True)
    sys.exit(error.exit_code)


def main() -> NoReturn:
    try:
        cli.main(standalone_mode=False)
        sys.exit(0)
    except Stopped:
        sys.exit(0)
    except OutboxError as error:
        fail(error)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.UsageError as error:
        fail(ConfigError(error.format_message(), "see --help"))
    except click.Abort:
        sys.exit(0)
    except click.ClickException as error:
        fail(ConfigError(error.format_message()))
    except Exception as error:
        # A traceback can quote a DSN; the class and the place are enough to report it.
        if log.isEnabledFor(logging.DEBUG):
            log.debug("traceback", exc_info=True)
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = f"{Path(place.tb_frame.f_code.co_filename).name}:{place.tb_lineno}" if place else "?"
        fail(OutboxError(f"unexpected {type(error).__name__} at {where}: {error}", "please report it"))
