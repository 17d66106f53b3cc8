"""The commands. With `options` the only module that imports click; nothing imports it.

A command imports what it alone needs: `--help` waits for no library, and `stream` starts without what the others use.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from cdc_outbox import __version__, config, logs
from cdc_outbox.config import Settings
from cdc_outbox.errors import ConfigError, OutboxError, PreconditionError, Stopped
from cdc_outbox.event import legal_topic
from cdc_outbox.options import (
    Commands,
    Duration,
    Moment,
    Role,
    brokers,
    choosing,
    column_map,
    common,
    deleting,
    examples,
    inbox_table,
    librdkafka,
    option,
    producing,
    record,
)
from cdc_outbox.wakeup import Wakeup

if TYPE_CHECKING:
    from cdc_outbox.dead_letter import DeadLetters
    from cdc_outbox.purge import Purge
    from cdc_outbox.query import Queries
    from cdc_outbox.status_report import Status

log = logging.getLogger("cdc_outbox")

MOST_PEEKED = 100_000


@click.group(
    cls=Commands,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="cdc-outbox")
def cli() -> None:
    """Relays rows of an outbox table from Postgres's WAL to Kafka: committed rows, all of them, and nothing else."""


@cli.command(
    "init-slot",
    epilog=examples(
        "cdc-outbox init-slot -d postgresql://owner@db/app --app-role app --relay-role relay",
        "cdc-outbox init-slot --shard 2/3 --dry-run",
    ),
)
@common
@column_map
@option("--dry-run", is_flag=True, help="Print the SQL instead of executing it.")
@option("--failover", is_flag=True, help="A slot that standbys keep too (PostgreSQL 17 and later).")
@option("--wait", type=Duration(), default="60s", help="The longest wait for older transactions.")
@option("--app-role", type=Role(), help="Let this role insert jobs, and nothing else.")
@option("--relay-role", type=Role(), help="Let this role do what the relay needs, and nothing else.")
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
    from cdc_outbox.setup import Setup

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


@cli.command(
    "drop-slot",
    epilog=examples(
        "cdc-outbox drop-slot",
        "cdc-outbox drop-slot --slot old_slot --yes",
    ),
)
@common
@option("--yes", is_flag=True, help="Do not ask.")
def drop_slot(yes: bool, **given: Any) -> None:
    """Drop the slot and its checkpoint; table, publication and rows stay."""
    from cdc_outbox.teardown import drop, left_behind

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


@cli.command(
    epilog=examples(
        "cdc-outbox stream -d postgresql://relay@db/app -b kafka-1:9092,kafka-2:9092",
        "cdc-outbox stream -b localhost:9092 -t 'jobs.{task}' --create-topics --until-caught-up",
    ),
)
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
def stream(**given: Any) -> None:
    """Relay committed rows to Kafka until stopped; stand by while another relay holds the slot."""
    from cdc_outbox import progress
    from cdc_outbox.metrics import Figures
    from cdc_outbox.purge import PurgeThread
    from cdc_outbox.relay import Relay

    given["purge_every"] = None if given["purge_every"] == "off" else given["purge_every"]
    given["metrics_address"] = None if given["metrics_address"] == "off" else given["metrics_address"]
    settings = database_settings(given, streaming=True)
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
            from cdc_outbox.http import MetricsServer
            from cdc_outbox.slot_watch import SlotWatch

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
            with progress.shown(progress.catching_up(figures)):
                relay.run()
            log.info("stopped; %d rows relayed", figures.relayed_rows)
        finally:
            if purging is not None:
                purging.close()
            if server is not None and watch is not None:
                server.close()
                watch.close()


@cli.command(
    epilog=examples(
        "cdc-outbox purge --dry-run",
        "cdc-outbox purge --every 30s --archive --archive-retain 7d",
    ),
)
@common
@option("--every", type=Duration(above_zero=True), help="Go on, with a round this often; otherwise one round.")
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


@cli.command(
    epilog=examples(
        "cdc-outbox replay --since 2h --task send_receipt --dry-run",
        "cdc-outbox replay --id 42 --id 43",
    ),
)
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
    from cdc_outbox import rewriting
    from cdc_outbox.archive import Archive, Choice, Roles
    from cdc_outbox.conninfo import complete_conninfo
    from cdc_outbox.objects import require

    if since is not None and until is not None and datetime.fromisoformat(since) >= datetime.fromisoformat(until):
        raise ConfigError("--since and --until: the first must be the earlier")
    settings = database_settings(given)
    choice = Choice(since, until, tasks, ids)
    with queries_for(settings) as queries:
        column = settings.record_format().column
        objects = require(queries, settings.table, settings.slot, settings.publication)
        archive = Archive(queries, objects, Roles(column("id"), column("task"), column("headers")))
        rows = archive.count(choice)
        click.echo(f"{rows} archived rows")
        if not dry_run:
            with rewriting.shown(complete_conninfo(settings.dsn), objects, "staging", rows, archive.bytes_a_row()):
                staged = archive.replay(choice)
            click.echo(f"{staged} rows staged again")


@cli.command(
    epilog=examples(
        "cdc-outbox peek --limit 1",
        "cdc-outbox peek --topic 'jobs.{task}' --format cloudevents",
    ),
)
@common
@record
@option("--limit", type=click.IntRange(1, MOST_PEEKED), default=10, help="At most so many rows.")
def peek(limit: int, **given: Any) -> None:
    """What the slot would bring next, as `stream` would produce it: a line of JSON a row. Nothing is taken or sent.
    While a relay streams there is nothing to see; stop it first."""
    from cdc_outbox.objects import require
    from cdc_outbox.peek import peek as rows

    settings = database_settings(given, producing=True)
    with queries_for(settings) as queries:
        objects = require(queries, settings.table, settings.slot, settings.publication)
        for row in rows(queries, objects, settings.record_format(), limit):
            click.echo(row)


@cli.group("dead-letters", cls=Commands, no_args_is_help=False)
def dead_letters() -> None:
    """Rows that Kafka would never have taken (stream --on-poison dead-letter)."""


@dead_letters.command(
    "list",
    epilog=examples(
        "cdc-outbox dead-letters list",
        "cdc-outbox dead-letters list --json",
    ),
)
@common
@option("--json", "as_json", is_flag=True, help="Report as JSON.")
def list_letters(as_json: bool, **given: Any) -> None:
    """What was set aside, when, and why; never a row's key or value."""
    from cdc_outbox.dead_letter import as_line

    with letters_for(database_settings(given)) as letters:
        found = letters.all()
    if as_json:
        click.echo(json.dumps(found))
    else:
        click.echo("\n".join(map(as_line, found)) or "no dead letters")


@dead_letters.command(
    "retry",
    epilog=examples(
        "cdc-outbox dead-letters retry --all",
        "cdc-outbox dead-letters retry --task send_receipt",
    ),
)
@common
@column_map
@choosing
@option("--all", "every", is_flag=True, help="All of them.")
def retry_letters(ids: tuple[str, ...], tasks: tuple[str, ...], every: bool, **given: Any) -> None:
    """Stage rows again under their own ids, once the limit was raised or the topic's name made legal."""
    must_choose(ids, tasks, every)
    with letters_for(database_settings(given)) as letters:
        click.echo(f"{letters.retry(ids, tasks)} rows staged again")


@dead_letters.command(
    "discard",
    epilog=examples(
        "cdc-outbox dead-letters discard --id 42",
        "cdc-outbox dead-letters discard --all",
    ),
)
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
    from cdc_outbox.conninfo import complete_conninfo
    from cdc_outbox.query import Queries

    with Wakeup() as wakeup:
        queries = Queries(complete_conninfo(settings.dsn), wakeup)
        try:
            yield queries
        finally:
            queries.close()


@contextlib.contextmanager
def letters_for(settings: Settings) -> Iterator[DeadLetters]:
    from cdc_outbox.dead_letter import DeadLetters
    from cdc_outbox.objects import require

    with queries_for(settings) as queries:
        objects = require(queries, settings.table, settings.slot, settings.publication)
        yield DeadLetters(queries, objects, settings.record_format().column("id"))


@cli.command(
    epilog=examples(
        "cdc-outbox status --watch",
        "cdc-outbox status --shard 2/3 --json",
    ),
)
@common
@option("--json", "as_json", is_flag=True, help="Report as JSON.")
@option(
    "--watch",
    type=Duration(above_zero=True),
    is_flag=False,
    flag_value="2s",
    help="Go on, looking this often (2s if bare).",
)
def status(as_json: bool, watch: float | None, **given: Any) -> None:
    """Slot, lag, WAL held and left, what holds it back, and what waits. Exit 0 whenever it could look."""
    from cdc_outbox.status import look
    from cdc_outbox.status_text import lines

    settings = database_settings(given)
    clear = watch is not None and sys.stdout.isatty() and not as_json

    def show(found: Status) -> None:
        if clear:
            click.clear()
        click.echo(found.as_json() if as_json else "\n".join(lines(found)) + ("\n" if watch else ""))

    with Wakeup() as wakeup:
        look(settings, wakeup, watch, show)


@cli.command(
    epilog=examples(
        "cdc-outbox doctor",
        "cdc-outbox doctor -b localhost:9092 -X security.protocol=SSL",
    ),
)
@common
@producing
@option("--json", "as_json", is_flag=True, help="Report as JSON.")
def doctor(as_json: bool, **given: Any) -> None:
    """Check every precondition, and say what mends it; exit 3 if one fails. Kafka's too if a broker is named."""
    from cdc_outbox.doctor import examine, failed, findings_as_json

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


@cli.command(
    epilog=examples(
        "cdc-outbox verify -b localhost:9092",
        "cdc-outbox verify -b localhost:9092 --gate G3 --scratch-topic scratch",
    ),
)
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

    if scratch_topic is not None and not legal_topic(scratch_topic):
        raise ConfigError(f"--scratch-topic {scratch_topic!r}: a topic's name has letters, digits, . _ and - only")
    settings = database_settings({**given, "topic": scratch_topic or "scratch"}, streaming=True)
    say = (lambda result: None) if as_json else click.echo
    results = verification.verify(settings, scratch_topic, say, only)
    if as_json:
        click.echo(verification.results_as_json(results))
    if not verification.kept(results):
        sys.exit(1)


@cli.command(
    "init-inbox",
    epilog=examples(
        "cdc-outbox init-inbox -d postgresql://owner@db/worker",
        "cdc-outbox init-inbox --inbox jobs.inbox",
    ),
)
@common
@inbox_table
def init_inbox(inbox: str, **given: Any) -> None:
    """Make the table in which a worker notes what it has done, in the worker's own database; idempotent."""
    from cdc_outbox.inbox_setup import make_inbox

    settings = database_settings(given)
    with Wakeup() as wakeup:
        click.echo(make_inbox(settings, wakeup, inbox))


@cli.command(
    "inbox-trim",
    epilog=examples(
        "cdc-outbox inbox-trim --age 30d",
        "cdc-outbox inbox-trim --inbox jobs.inbox --age 12h",
    ),
)
@common
@inbox_table
@option("--age", type=Duration(), required=True, help="Forget what was done longer ago than this.")
def inbox_trim(inbox: str, age: float, **given: Any) -> None:
    """Forget old rows of a worker's inbox; keep them longer than Kafka keeps the topic."""
    from cdc_outbox.inbox_setup import trim_inbox

    settings = database_settings(given)
    with Wakeup() as wakeup:
        click.echo(f"{trim_inbox(settings, wakeup, inbox, age)} rows forgotten")


SHELLS = ("bash", "zsh", "fish")


@cli.command(
    epilog=examples(
        "cdc-outbox completion bash > /etc/bash_completion.d/cdc-outbox",
        "cdc-outbox completion fish > ~/.config/fish/completions/cdc-outbox.fish",
    ),
)
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script with which a shell completes commands and options; read it anew after an update."""
    from click.shell_completion import get_completion_class

    complete = get_completion_class(shell)
    assert complete is not None
    click.echo(complete(cli, {}, "cdc-outbox", "_CDC_OUTBOX_COMPLETE").source())


@cli.command(
    epilog=examples(
        "cdc-outbox demo",
        "cdc-outbox demo --keep",
    ),
)
@click.option("--keep", is_flag=True, help="Leave all running, and say how to look at it.")
def demo(keep: bool) -> None:
    """All of it on an embedded Postgres and an embedded broker: no server, no Docker."""
    from cdc_outbox.demo import run_demo

    run_demo(keep=keep)


def new_purge(settings: Settings, wakeup: Wakeup) -> Purge:
    from cdc_outbox.conninfo import complete_conninfo
    from cdc_outbox.purge import Purge

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
    from cdc_outbox.setup import Setup

    Setup(settings, wakeup, say=log.warning, warn=log.warning).run()


def database_settings(given: dict[str, Any], *, streaming: bool = False, producing: bool = False) -> Settings:
    """Also sets up logging, whose options every command has."""
    logs.set_up(given.pop("log_format"), given.pop("log_level"))
    if "record_format" in given:
        given["cloudevents"] = given.pop("record_format") == "cloudevents"
    shard = given["shard"]
    if shard is not None:
        given |= {name: shard.name(given[name]) for name in ("slot", "publication")}
    settings = Settings(**given)
    config.check(settings, streaming=streaming, producing=producing)
    return settings


def fail(error: OutboxError) -> NoReturn:
    """One line that says what is wrong, and what to do next."""
    click.echo(logs.redacted(f"error: {error}" + (f"; hint: {error.hint}" if error.hint else "")), err=True)
    sys.exit(error.exit_code)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """`args`: the process's own by default."""
    try:
        cli.main(args, standalone_mode=False)
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
