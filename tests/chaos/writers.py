"""Applications that stage rows in transactions of many shapes, and go on whenever Postgres lets them."""

import contextlib
import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import psycopg

from tests.chaos.truth import Attempt, Said

ROLLED_BACK = 0.1
INSERT = """
insert into outbox (task, args) select %s, jsonb_build_object('n', n) from generate_series(%s::int, %s::int) n"""
MARK = "insert into chaos_transaction (tx) values (%s)"
COPY = "copy outbox (task, args) from stdin"
AWAY = (psycopg.OperationalError, psycopg.InterfaceError)
"""Postgres is down, or this connection is dead: connect again."""

Connection = psycopg.Connection[Any]


@dataclass(slots=True)
class Work:
    """A transaction that is open."""

    tx: int
    kept: list[range] = field(default_factory=list)
    undone: list[range] = field(default_factory=list)


class Writer:
    """One thread with a task of its own. What it did is in `attempts`, in commit order."""

    pause: float
    numbers = itertools.count(1)  # of transactions, across all writers

    def __init__(self, name: str, dsn: str, seed: int, stop: threading.Event) -> None:
        self.task = name
        self.attempts: list[Attempt] = []
        self.failure: BaseException | None = None
        self.dsn = dsn
        self.choice = random.Random(f"{name} {seed}")
        self.stop = stop
        self._next = 0
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        try:
            while not self.stop.is_set():
                with contextlib.suppress(*AWAY):
                    self.session()
                self.stop.wait(0.05)  # Postgres is away
            self.finish()
        except BaseException as failure:
            self.failure = failure

    def session(self) -> None:
        """Transactions until the end, or until the connection dies."""
        with self.connect() as connection:
            while not self.stop.wait(self.choice.uniform(0.5, 1.5) * self.pause):
                self.transaction(connection)

    def transaction(self, connection: Connection) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """After the last transaction."""

    def connect(self) -> Connection:
        return psycopg.connect(self.dsn, connect_timeout=5)

    # -- the parts of a transaction -------------------------------------------------------------------------------

    def begin(self, connection: Connection) -> Work:
        work = Work(next(self.numbers))
        connection.execute(MARK, (work.tx,))
        return work

    def take(self, count: int) -> range:
        """The numbers of the next rows."""
        self._next += count
        return range(self._next - count, self._next)

    def insert(self, connection: Connection, count: int) -> range:
        rows = self.take(count)
        connection.execute(INSERT, (self.task, rows.start, rows.stop - 1))
        return rows

    def end(self, connection: Connection, work: Work) -> None:
        """Commit, or one time in ten roll back, and note what was said to it."""
        if self.choice.random() < ROLLED_BACK:
            self.note(work, Said.ROLLED_BACK)
            connection.rollback()
            return
        said = Said.NOTHING
        try:
            connection.commit()
            said = Said.COMMITTED
        finally:
            self.note(work, said)

    def note(self, work: Work, said: Said) -> None:
        self.attempts.append(Attempt(work.tx, self.task, tuple(work.kept), tuple(work.undone), said))

    @contextlib.contextmanager
    def work(self, connection: Connection) -> Iterator[Work]:
        """A transaction from its begin to its end; what dies before its COMMIT was not committed."""
        work = self.begin(connection)
        try:
            yield work
        except AWAY:
            self.note(work, Said.ROLLED_BACK)
            raise
        self.end(connection, work)


class SingleRows(Writer):
    pause = 0.01

    def transaction(self, connection: Connection) -> None:
        with self.work(connection) as work:
            work.kept.append(self.insert(connection, 1))


class Savepoints(Writer):
    """Rows, rows that are rolled back to a savepoint, and rows."""

    pause = 0.05

    def transaction(self, connection: Connection) -> None:
        with self.work(connection) as work:
            work.kept.append(self.insert(connection, self.choice.randint(1, 6)))
            with contextlib.suppress(psycopg.Rollback), connection.transaction():
                work.undone.append(self.insert(connection, self.choice.randint(1, 6)))
                raise psycopg.Rollback
            work.kept.append(self.insert(connection, self.choice.randint(1, 6)))


class TenThousandRows(Writer):
    pause = 9.0

    def transaction(self, connection: Connection) -> None:
        with self.work(connection) as work:
            for _ in range(4):
                work.kept.append(self.insert(connection, 2500))


class Copies(Writer):
    pause = 1.5

    def transaction(self, connection: Connection) -> None:
        with self.work(connection) as work:
            rows = self.take(self.choice.randint(100, 1000))
            work.kept.append(rows)
            with connection.cursor().copy(COPY) as copy:
                for n in rows:
                    copy.write_row((self.task, f'{{"n": {n}}}'))


class LateCommits(Writer):
    """Several transactions stay open, so that low ids are committed behind higher ones; the first for very long."""

    pause = 0.08
    WEIGHTS = (1, 20, 30, 40)
    """Of being the next one to commit."""

    def session(self) -> None:
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(self.connect()) for _ in self.WEIGHTS]
            waiting: dict[int, Work] = {}
            try:
                while not self.stop.wait(self.choice.uniform(0.5, 1.5) * self.pause):
                    (index,) = self.choice.choices(range(len(connections)), self.WEIGHTS)
                    if (work := waiting.pop(index, None)) is not None:
                        self.end(connections[index], work)
                    waiting[index] = work = self.begin(connections[index])
                    work.kept.append(self.insert(connections[index], self.choice.randint(1, 5)))
                for connection in connections:
                    connection.rollback()
            finally:
                for work in waiting.values():
                    self.note(work, Said.ROLLED_BACK)


class TwoPhases(Writer):
    """Prepared transactions, which outlive every crash, and their second phase much later."""

    pause = 0.1
    MOST = 5

    def __init__(self, name: str, dsn: str, seed: int, stop: threading.Event) -> None:
        super().__init__(name, dsn, seed, stop)
        self._prepared: list[Work] = []

    def session(self) -> None:
        with self.connect() as connection:
            connection.autocommit = True
            self._after_a_crash(connection)
            while not self.stop.wait(self.choice.uniform(0.5, 1.5) * self.pause):
                if len(self._prepared) < self.MOST and self.choice.random() < 0.6:
                    self._prepare(connection)
                elif self._prepared:
                    self._settle(connection, self.choice.choice(self._prepared))

    def finish(self) -> None:
        with self.connect() as connection:
            connection.autocommit = True
            self._after_a_crash(connection)
            for work in list(self._prepared):
                self._settle(connection, work)

    def _prepare(self, connection: Connection) -> None:
        connection.execute("begin")
        work = self.begin(connection)
        work.kept.append(self.insert(connection, self.choice.randint(1, 20)))
        self._prepared.append(work)  # first: nothing may be said of it any more
        connection.execute(f"prepare transaction '{self._gid(work)}'".encode())

    def _settle(self, connection: Connection, work: Work) -> None:
        verb, said = (
            ("rollback", Said.ROLLED_BACK) if self.choice.random() < ROLLED_BACK else ("commit", Said.COMMITTED)
        )
        connection.execute(f"{verb} prepared '{self._gid(work)}'".encode())
        self._prepared.remove(work)
        self.note(work, said)

    def _after_a_crash(self, connection: Connection) -> None:
        """What is not prepared any more was settled, or never got that far: the side table knows."""
        there = {gid for (gid,) in connection.execute("select gid from pg_prepared_xacts").fetchall()}
        gone = [work for work in self._prepared if self._gid(work) not in there]
        for work in gone:
            self._prepared.remove(work)
            self.note(work, Said.NOTHING)

    def _gid(self, work: Work) -> str:
        return f"{self.task} {work.tx}"


SHAPES: Sequence[tuple[str, type[Writer]]] = (
    ("mail", SingleRows),
    ("invoice.pdf", SingleRows),
    ("größe", Savepoints),
    ("re index", Copies),
    ("bulk", TenThousandRows),
    ("late", LateCommits),
    ("two phases", TwoPhases),
)


class Writers:
    """All of them, from `with` to the end of it."""

    def __init__(self, dsn: str, seed: int, shapes: Sequence[tuple[str, type[Writer]]] = SHAPES) -> None:
        self._stop = threading.Event()
        self._all = [shape(name, dsn, seed, self._stop) for name, shape in shapes]

    def __enter__(self) -> Self:
        for writer in self._all:
            writer.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def join(self, seconds: float) -> list[Attempt]:
        """What they did. Raises what one of them failed of."""
        self._stop.set()
        for writer in self._all:
            writer.thread.join(seconds)
            if writer.failure is not None:
                raise writer.failure
            if writer.thread.is_alive():
                raise TimeoutError(f"the writer {writer.task} does not end")
        return [attempt for writer in self._all for attempt in writer.attempts]
