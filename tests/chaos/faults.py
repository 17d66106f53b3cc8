"""What may happen to a relay, its servers and the network between them: each a `with` that strikes and heals."""

import contextlib
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import psycopg

from cdc_outbox.embedded import ServerProcess
from cdc_outbox.errors import PreconditionError
from tests.chaos.plan import Kind
from tests.chaos.service import Service
from tests.chaos.site import Site
from tests.chaos.writers import AWAY
from tests.fix_proxy import Direction, Proxy
from tests.waiting import eventually

LATENCY_SECONDS = 0.2
FLAP_SECONDS = (0.1, 0.8)
AT_ONCE = (0.0, 0.0)
BACKENDS = "select pid from pg_stat_activity where application_name = 'cdc-outbox' and datname = current_database()"

Choice = random.Random
Strike = Callable[[Site, Choice], AbstractContextManager[None]]
Body = Callable[[Site, Choice], Iterator[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    part: str
    seconds: tuple[float, float]
    strike: Strike
    telling: bool

    @property
    def kind(self) -> Kind:
        return Kind(self.part, self.seconds, self.telling)


FAULTS: dict[str, Fault] = {}


def fault(name: str, part: str, seconds: tuple[float, float], *, telling: bool = False) -> Callable[[Body], Strike]:
    def register(body: Body) -> Strike:
        strike = contextlib.contextmanager(body)
        FAULTS[name] = Fault(part, seconds, strike, telling)
        return strike

    return register


# -- the relays and the purge ---------------------------------------------------------------------------------------


def _relay(site: Site, choice: Choice) -> Service:
    """Mostly the one that streams."""
    streaming = site.streaming
    return streaming if streaming is not None and choice.random() < 0.8 else choice.choice(site.relays)


@fault("relay: kill -9", "relay", AT_ONCE, telling=True)
def relay_killed(site: Site, choice: Choice) -> Iterator[None]:
    _relay(site, choice).running.kill9()
    yield


@fault("relay: kill -9 of both", "relay", AT_ONCE)
def relays_killed(site: Site, choice: Choice) -> Iterator[None]:
    for relay in site.relays:
        relay.running.kill9()
    yield


@fault("relay: SIGTERM", "relay", AT_ONCE)
def relay_stopped(site: Site, choice: Choice) -> Iterator[None]:
    _relay(site, choice).running.signal(signal.SIGTERM)
    yield


@fault("relay: STOP, CONT", "relay", (1, 8))
def relay_frozen(site: Site, choice: Choice) -> Iterator[None]:
    running = _relay(site, choice).running
    running.pause()
    yield
    running.resume()


@fault("purge: kill -9", "purge", AT_ONCE)
def purge_killed(site: Site, choice: Choice) -> Iterator[None]:
    site.purge.running.kill9()
    yield


# -- the broker -----------------------------------------------------------------------------------------------------


@fault("broker: kill -9", "broker", (0.2, 3))
def broker_killed(site: Site, choice: Choice) -> Iterator[None]:
    site.kafka.kill9()
    yield
    site.kafka.start()


@fault("broker: restart", "broker", (0.1, 1))
def broker_restarted(site: Site, choice: Choice) -> Iterator[None]:
    _stop(site.kafka.stop)
    yield
    site.kafka.start()


@fault("broker: STOP, CONT", "broker", (1, 8), telling=True)
def broker_frozen(site: Site, choice: Choice) -> Iterator[None]:
    yield from _frozen(site.kafka)


def _frozen(server: ServerProcess) -> Iterator[None]:
    server.pause()
    yield
    server.resume()


def _stop(stop: Callable[[], None]) -> None:
    with contextlib.suppress(TimeoutError):  # it was killed then
        stop()


# -- Postgres -------------------------------------------------------------------------------------------------------


@fault("Postgres: restart -m fast", "postgres", (0.1, 2))
def postgres_fast(site: Site, choice: Choice) -> Iterator[None]:
    _stop(site.postgres.stop)
    yield
    site.postgres.start()


@fault("Postgres: restart -m immediate", "postgres", (0.1, 2))
def postgres_immediate(site: Site, choice: Choice) -> Iterator[None]:
    _stop(lambda: site.postgres.stop("immediate"))
    yield
    site.postgres.start()


@fault("Postgres: kill -9 of the postmaster", "postgres", (0.1, 2), telling=True)
def postmaster_killed(site: Site, choice: Choice) -> Iterator[None]:
    """Alone: its children find out for themselves, and until the last of them is gone no other can start."""
    site.postgres.send_signal(signal.SIGKILL)

    def started() -> bool:
        with contextlib.suppress(PreconditionError):
            site.postgres.start()
        return site.postgres.running

    yield
    eventually(started, 60, "a postmaster after the killed one")


@fault("Postgres: STOP, CONT", "postgres", (1, 6))
def postgres_frozen(site: Site, choice: Choice) -> Iterator[None]:
    yield from _frozen(site.postgres)


@fault("Postgres: a backend of the relays terminated", "postgres", AT_ONCE)
def backend_terminated(site: Site, choice: Choice) -> Iterator[None]:
    pids = [pid for (pid,) in site.database.fetch(BACKENDS)]
    if pids:
        site.database.execute("select pg_terminate_backend(%s)", (choice.choice(sorted(pids)),))
    yield


@fault("Postgres: all backends of the relays terminated", "postgres", AT_ONCE)
def backends_terminated(site: Site, choice: Choice) -> Iterator[None]:
    site.database.execute(f"select pg_terminate_backend(pid) from ({BACKENDS}) b")
    yield


@fault("Postgres: a synchronous standby is silent", "postgres", (1, 4), telling=True)
def standby_silent(site: Site, choice: Choice) -> Iterator[None]:
    """What is committed is decoded and not visible, until the standby is given up."""
    _configure(site, "alter system set synchronous_standby_names = 'ghost'")
    yield
    _configure(site, "alter system reset synchronous_standby_names")


def _configure(site: Site, statement: str) -> None:
    def done() -> bool:
        with contextlib.suppress(*AWAY), psycopg.connect(site.postgres.socket_dsn(), autocommit=True) as connection:
            connection.execute(statement.encode())
            connection.execute("select pg_reload_conf()")
            return True
        return False

    eventually(done, 60, statement)


# -- the network ----------------------------------------------------------------------------------------------------


def _links(site: Site, choice: Choice) -> list[Proxy]:
    """To Postgres: of both relays, or of one."""
    links = list(site.postgres_links)
    return links if choice.random() < 0.5 else [choice.choice(links)]


def _broker_link(site: Site, choice: Choice) -> list[Proxy]:
    return [site.kafka_link]


def _cut(links: list[Proxy], choice: Choice) -> Iterator[None]:
    for link in links:
        link.cut()
    yield


def _refused(links: list[Proxy], choice: Choice) -> Iterator[None]:
    for link in links:
        link.refuse()
    yield
    for link in links:
        link.accept()


def _black_hole(links: list[Proxy], choice: Choice) -> Iterator[None]:
    """One way or both; in the end what was held back gets through, or the connection is gone."""
    directions: tuple[Direction, ...] = ("both", "to_client", "to_server")
    direction = choice.choice(directions)
    for link in links:
        link.stall(direction)
    yield
    for link in links:
        if choice.random() < 0.5:
            link.cut()
        link.resume(direction)


def _slow(links: list[Proxy], choice: Choice) -> Iterator[None]:
    for link in links:
        link.slow(delay=LATENCY_SECONDS)
    yield
    for link in links:
        link.slow()


def _flapping(links: list[Proxy], choice: Choice) -> Iterator[None]:
    over = threading.Event()

    def flap() -> None:
        while not over.wait(choice.uniform(*FLAP_SECONDS)):
            for link in links:
                link.refuse()
            over.wait(choice.uniform(*FLAP_SECONDS))
            for link in links:
                link.accept()

    thread = threading.Thread(target=flap, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()


NETWORK = (
    ("reset", AT_ONCE, _cut),
    ("refused", (0.5, 4.0), _refused),
    ("black hole", (1.0, 8.0), _black_hole),
    ("200 ms", (2.0, 6.0), _slow),
    ("flapping", (2.0, 6.0), _flapping),
)
for _name, _seconds, _act in NETWORK:
    for _part, _chosen in (("Postgres", _links), ("broker", _broker_link)):

        @fault(f"link to {_part}: {_name}", f"link to {_part}", _seconds, telling=_name == "black hole")
        def _on_the_network(
            site: Site,
            choice: Choice,
            act: Callable[[list[Proxy], Choice], Iterator[None]] = _act,
            chosen: Callable[[Site, Choice], list[Proxy]] = _chosen,
        ) -> Iterator[None]:
            yield from act(chosen(site, choice), choice)
