"""The hands of `verify`: what an application, an operator and a worker do, for the gates to say it in one line each.

A relay is started with the options that a gate needs and used on by the next one if it needs the same. Waits are for
conditions; where "nothing happens" is the promise, the wait says how long.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from cdc_outbox.errors import OutboxError
from cdc_outbox.scratch import Database, Scratch
from cdc_outbox.scratch_process import CommandProcess
from cdc_outbox.scratch_worker import Record

NO_PURGE = ("--purge-every", "off")
SOON_PURGED = ("--purge-every", "300ms")
PATIENCE_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Found:
    tried: str
    figures: Mapping[str, float]
    note: str = ""


class Broken(OutboxError):
    """A promise was not kept."""


class Trial:
    """The application's and the operator's hands."""

    def __init__(self, scratch: Scratch, deadline: float) -> None:
        """Nothing is waited for beyond `deadline` (monotonic)."""
        self.scratch, self.deadline = scratch, deadline
        self.worker = scratch.worker
        self.db = scratch.connect()
        self.open = scratch.connect(autocommit=False)
        self._relay: CommandProcess | None = None
        self._options: tuple[str, ...] = ()

    # -- relays -------------------------------------------------------------------------------------------------

    def relay(self, *options: str) -> CommandProcess:
        """One that streams, with these options."""
        if self._relay is not None and self._relay.running and self._options == options:
            return self._relay
        self.stop()
        return self.adopt(self.standby(*options), *options)

    def adopt(self, relay: CommandProcess, *options: str) -> CommandProcess:
        relay.wait_for("streaming ", PATIENCE_SECONDS)
        self._relay, self._options = relay, options
        return relay

    def standby(self, *options: str) -> CommandProcess:
        """One that streams once it may."""
        return self.scratch.start("stream", "--metrics-address", "127.0.0.1:0", *options)

    def stop(self) -> None:
        if self._relay is not None:
            self._relay.resume()
            self._relay.stop()
            self._relay = None

    def start_over(self) -> None:
        """Nothing of a gate that failed may reach into the next one."""
        self.scratch.kill()
        self._relay = None
        with contextlib.suppress(Exception):  # without a connection the next gate says so
            self.open.rollback()

    @contextlib.contextmanager
    def unacknowledged(self, rows: int, *options: str) -> Iterator[CommandProcess]:
        """A relay that has read `rows` rows and does not send them yet; killed at the end."""
        relay = self.relay("-X", "linger.ms=900000", *options)
        try:
            self.until(lambda: relay.figure("cdc_outbox_in_flight_rows") >= rows, "rows in flight")
            yield relay
        finally:
            relay.kill9()

    def purge(self) -> None:
        """One round, run apart."""
        purge = self.scratch.start("purge")
        purge.wait(PATIENCE_SECONDS)
        if purge.exit_code != 0:
            purge.raise_failure("did not end")

    # -- rows ---------------------------------------------------------------------------------------------------

    def stage(self, gate: str, count: int = 1, *, on: Database | None = None) -> list[str]:
        return self.scratch.stage(on or self.db, gate, count)

    def rows(self, ids: Iterable[str]) -> set[str]:
        """Which of these are in the table."""
        found = self.db.execute("select id::text from outbox where id::text = any(%s)", [list(ids)]).fetchall()
        return {str(row[0]) for row in found}

    def of(self, gate: str) -> list[Record]:
        task = self.scratch.task(gate)
        return [record for record in self.worker.records if record.task == task]

    # -- waiting ------------------------------------------------------------------------------------------------

    def read_until(
        self, done: Callable[[], bool], what: str, seen: Callable[[list[Record]], None] | None = None
    ) -> None:
        """Reads the topic meanwhile."""
        if not self.worker.read_until(done, self._patience(), seen):
            raise Broken(f"waited in vain for {what}")

    def receive(self, ids: Iterable[str], seen: Callable[[list[Record]], None] | None = None) -> None:
        """Until all of them have reached Kafka."""
        wanted = set(ids)
        if not self.worker.read_until(lambda: wanted <= self.worker.ids, self._patience(), seen):
            raise Broken(f"{len(wanted - self.worker.ids)} of {len(wanted)} committed rows did not reach Kafka")

    def receive_all(self, gate: str, ids: list[str]) -> None:
        """As `receive`, and soon sure of what is lost: rows of one task keep the order of their commits, so that
        nothing is still to come before one that is committed now."""
        self.receive(self.stage(gate))
        lost = set(ids) - self.worker.ids
        must(not lost, f"{len(lost)} of {len(ids)} committed rows did not reach Kafka")

    def read_for(self, seconds: float) -> None:
        self.worker.read_until(lambda: False, seconds)

    def until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._patience()
        while not done():
            if time.monotonic() > deadline:
                raise Broken(f"waited in vain for {what}")
            time.sleep(0.02)  # nothing to wait on: another process gets there

    def _patience(self) -> float:
        return max(0.0, min(PATIENCE_SECONDS, self.deadline - time.monotonic()))


class InBackground:
    """Something that takes a while, beside us."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as failure:  # raised in the thread that asks
            self._failure = failure

    @property
    def done(self) -> bool:
        """Raises what it failed with."""
        if self._failure is not None:
            raise self._failure
        return not self._thread.is_alive()


class Load:
    """Two writers; one transaction in ten rolls back."""

    def __init__(self, trial: Trial, gate: str) -> None:
        self.committed: list[str] = []
        self.rolled_back: list[str] = []
        self._trial, self._gate = trial, gate
        self._stop = threading.Event()
        self._sessions = [trial.scratch.connect(autocommit=False) for _ in range(2)]

    def __enter__(self) -> Load:
        self._writers = [InBackground(lambda db=db: self._write(db)) for db in self._sessions]  # type: ignore[misc]
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        if kind is None:
            self._trial.until(lambda: all(writer.done for writer in self._writers), "the writers")

    def _write(self, db: Database) -> None:
        while not self._stop.wait(0.004):
            ids = self._trial.stage(self._gate, random.randint(1, 5), on=db)
            if random.random() < 0.1:
                db.rollback()
                self.rolled_back += ids
            else:
                db.commit()
                self.committed += ids


def must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Broken(otherwise)
