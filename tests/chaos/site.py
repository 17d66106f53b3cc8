"""The parts of a run: real servers, proxies between them and the relays, two relays, a purge run apart."""

import contextlib
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from psycopg.conninfo import make_conninfo

from cdc_outbox.embedded import PostgresServer, postgres_bindir
from tests.chaos.service import Service
from tests.chaos.topic import CONFIG
from tests.chaos.truth import TABLES
from tests.fix_command import Command, Running, scrape
from tests.fix_kafka import Broker
from tests.fix_postgres import Database
from tests.fix_proxy import Proxy
from tests.kafka_server import KafkaServer
from tests.relay_rig import metrics_url

PARTITIONS = 3
PURGE_EVERY = "200ms"
SETTINGS = {
    # A connection that is half-open is noticed soon, so that a short run sees it happen.
    "wal_sender_timeout": "4s",
    "max_wal_size": "2GB",
    "autovacuum_naptime": "10s",
}


@dataclass(frozen=True, slots=True)
class Site:
    postgres: PostgresServer
    kafka: KafkaServer
    database: Database
    topic: str
    postgres_links: Sequence[Proxy]
    """One for each relay."""
    kafka_link: Proxy
    relays: Sequence[Service]
    purge: Service
    logs: Path
    """A folder for each process that was started; who is content removes it."""

    @property
    def services(self) -> Sequence[Service]:
        return (*self.relays, self.purge)

    @property
    def slot(self) -> str:
        return self.database.name

    @property
    def streaming(self) -> Service | None:
        """The relay that holds the slot, by its own account."""
        return next((relay for relay in self.relays if _streams(relay.running)), None)

    def close_services(self, seconds: float) -> list[str]:
        """What was wrong with their ends."""
        for service in self.services:
            service.retire(seconds)
        return [wrong for service in self.services for wrong in service.wrong]


def _streams(relay: Running) -> bool:
    # Frozen, or killed this very moment: then it does not answer, and another one is taken.
    with contextlib.suppress(OSError, AssertionError):
        samples = scrape(f"{metrics_url(relay)}/metrics")
        return any(value == 1 for name, value in samples.items() if name.startswith("cdc_outbox_streaming"))
    return False


@contextlib.contextmanager
def site(major: int, relays: int = 2) -> Iterator[Site]:
    """Everything set up, and the services at work."""
    with ExitStack() as stack:
        server = PostgresServer(postgres_bindir(major), settings=SETTINGS)
        postgres = stack.enter_context(server).start()
        kafka = KafkaServer()
        stack.callback(kafka.close)
        kafka.start()
        database = Database(postgres, f"chaos_{secrets.token_hex(4)}")
        database.create()
        topic = Broker("kafka", kafka.bootstrap, kafka).create_topic(partitions=PARTITIONS, config=CONFIG)
        kafka_link = Proxy("127.0.0.1", kafka.proxied_port, kafka.proxy_port)
        stack.callback(kafka_link.close)
        links = [Proxy("127.0.0.1", postgres.port) for _ in range(relays)]
        for link in links:
            stack.callback(link.close)
        logs = Path(tempfile.mkdtemp(prefix="chaos-"))
        command = Command(logs, stack)
        names = ["--slot", database.name, "--publication", database.name]
        done = command.run("init-slot", "--dsn", database.dsn, *names)
        if done.returncode:
            raise AssertionError(done.stderr)
        database.execute(TABLES)

        def relay(link: Proxy) -> Running:
            return command.start(
                *("stream", "--dsn", make_conninfo(database.dsn, port=link.port), *names),
                *("--bootstrap-servers", kafka.proxied_bootstrap, "--topic", topic),
                *("--metrics-address", "127.0.0.1:0", "--purge-every", PURGE_EVERY),
            )

        def purge() -> Running:
            return command.start("purge", "--dsn", database.dsn, *names, "--every", PURGE_EVERY)

        yield Site(
            postgres,
            kafka,
            database,
            topic,
            links,
            kafka_link,
            [Service(f"relay {n}", lambda link=link: relay(link)) for n, link in enumerate(links, 1)],  # type: ignore[misc]
            Service("purge", purge),
            logs,
        )
