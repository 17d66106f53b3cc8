"""The commands. The only module that imports click; nothing imports it."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from cdc_outbox import __version__, config, logs
from cdc_outbox.archive import Archive, Choice, Roles
from cdc_outbox.config import Settings
from cdc_outbox.dead_letter import DeadLetters, as_line
from cdc_outbox.doctor import examine, failed, findings_as_json
from cdc_outbox.errors import ConfigError, OutboxError, PreconditionError, Stopped
from cdc_outbox.http import MetricsServer
from cdc_outbox.inbox_setup import make_inbox, trim_inbox
from cdc_outbox.metrics import Figures
from cdc_outbox.objects import require
from cdc_outbox.purge import Purge, PurgeThread
from cdc_outbox.query import Queries, complete_conninfo
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
    every = {name for command in commands(cli).values() for name in option_names(command)}
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
@option("--create-topics", is_flag=True, help="Create a topic that does not exist.")
@option("--topic-partitions", type=int, default=-1, help="Of a topic created; -1 is the broker's default.")
@option("--topic-replication", type=int, default=-1, help="Replication factor of a topic created; -1 likewise.")
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
@deleting
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
@deleting
@option("--dry-run", is_flag=True, help="Count what would be deleted.")
def purge(every: float | None, dry_run: bool, **given: Any) -> None:
    """Delete relayed rows, for those who run it apart from `stream --purge-every off`."""
    settings = database_settings(given)
    verb = "would be purged" if dry_run else "purged"
    with Wakeup() as wakeup:
        purging = new_purge(settings, wakeup)
        try:
            while not wakeup.stop_requested:
                more = False
                try:
                    done = purging.round(dry_run=dry_run)
                    click.echo(f"{done.deleted} rows {verb}" + ("" if done.reached else "; the slot is not there yet"))
                    more = done.more and not dry_run
                except OutboxError as error:
                    if every is None or not error.retry:
                        raise
                    log.warning("%s; the next round tries again", error)
                if not more:
                    if every is None:
                        break
                    wakeup.wait((), every)
        finally:
            purging.close()


@cli.command()
@common
@column_map
@option("--since", type=Moment(), help="Rows archived then or later: a duration ago, or an ISO 8601 time.")
@option("--until", type=Moment(), help="Rows archived before: a duration ago, or an ISO 8601 time.")
@choosing
@option("--dry-run", is_flag=True, help="Count them, and stop there.")
def replay(
    since: str | None, until: str | None, ids: tuple[str, ...], tasks: tuple[str, ...], dry_run: bool, **given: Any
) -> None:
    """Stage archived rows again, under new ids and with the old one in the header `replay_of`."""
    settings = database_settings(given)
    choice = Choice(since, until, tasks, ids)
    with queries_for(settings) as queries:
        column = settings.record_format().column
        objects = require(queries, settings.table, settings.slot, settings.publication)
        archive = Archive(queries, objects, Roles(column("id"), column("task"), column("headers")))
        click.echo(f"{archive.count(choice)} archived rows")
        if not dry_run:
            click.echo(f"{archive.replay(choice)} rows staged again")


@cli.group("dead-letters", cls=Commands)
def dead_letters() -> None:
    """Rows that Kafka would never have taken (stream --on-poison dead-letter)."""


@dead_letters.command("list")
@common
@option("--json", "as_json", is_flag=True, help="Report as JSON.")
def list_letters(as_json: bool, **given: Any) -> None:
    """What was set aside, when, and why; never a row's key or value."""
    with letters_for(database_settings(given)) as letters:
        found = letters.all()
    if as_json:
        click.echo(json.dumps(found))
    else:
        click.echo("\n".join(map(as_line, found)) or "no dead letters")


@dead_letters.command("retry")
@common
@column_map
@choosing
@option("--all", "every", is_flag=True, help="All of them.")
def retry_letters(ids: tuple[str, ...], tasks: tuple[str, ...], every: bool, **given: Any) -> None:
    """Stage rows again under their own ids, once the limit was raised or the topic's name made legal."""
    must_choose(ids, tasks, every)
    with letters_for(database_settings(given)) as letters:
        click.echo(f"{letters.retry(ids, tasks)} rows staged again")


@dead_letters.command("discard")
@common
@choosing
@option("--all", "every", is_flag=True, help="All of them.")
def discard_letters(ids: tuple[str, ...], tasks: tuple[str, ...], every: bool, **given: Any) -> None:
    """Forget dead letters for good."""
    must_choose(ids, tasks, every)
    with letters_for(database_settings(given)) as letters:
        click.echo(f"{letters.discard(ids, tasks)} dead letters discarded")


def must_choose(ids: tuple[str, ...], tasks: tuple[str, ...], every: bool) -> None:
    if bool(ids or tasks) == every:
        raise ConfigError("which dead letters? give --id or --task, or --all")


@contextlib.contextmanager
def queries_for(settings: Settings) -> Iterator[Queries]:
    with Wakeup() as wakeup:
        queries = Queries(complete_conninfo(settings.dsn), wakeup)
        try:
            yield queries
        finally:
            queries.close()


@contextlib.contextmanager
def letters_for(settings: Settings) -> Iterator[DeadLetters]:
    with queries_for(settings) as queries:
        objects = require(queries, settings.table, settings.slot, settings.publication)
        yield DeadLetters(queries, objects, settings.record_format().column("id"))


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
@common
@brokers
@librdkafka
@option("--scratch-topic", help="A topic to use, where this role may not create one; its records stay.")
@option(
    "--gate",
    "only",
    multiple=True,
    type=click.Choice([f"G{number}" for number in range(1, 10)]),
    help="Try this one only; repeatable.",
)
@option("--json", "as_json", is_flag=True, help="Report as JSON.")
def verify(scratch_topic: str | None, only: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Try every promise for real, in a minute, with a schema, slot and topic of its own; exit 1 if one is not kept.

    Of --table, --slot and --publication nothing is touched; no setting of the server is changed.
    """
    from cdc_outbox import verify as verification

    settings = database_settings({**given, "topic": scratch_topic or "scratch"}, streaming=True)
    say = (lambda result: None) if as_json else click.echo
    results = verification.verify(settings, scratch_topic, say, only)
    if as_json:
        click.echo(verification.results_as_json(results))
    if not verification.kept(results):
        sys.exit(1)


@cli.command("init-inbox")
@common
@inbox_table
def init_inbox(inbox: str, **given: Any) -> None:
    """Make the table in which a worker notes what it has done, in the worker's own database; idempotent."""
    settings = database_settings(given)
    with Wakeup() as wakeup:
        click.echo(make_inbox(settings, wakeup, inbox))


@cli.command("inbox-trim")
@common
@inbox_table
@option("--age", type=Duration(), required=True, help="Forget what was done longer ago than this.")
def inbox_trim(inbox: str, age: float, **given: Any) -> None:
    """Forget old rows of a worker's inbox; keep them longer than Kafka keeps the topic."""
    settings = database_settings(given)
    with Wakeup() as wakeup:
        click.echo(f"{trim_inbox(settings, wakeup, inbox, age)} rows forgotten")


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
        archive=settings.archive,
        archive_retain=settings.archive_retain,
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
