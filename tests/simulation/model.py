"""What is durable in a simulation, and the promises about it: Postgres's side, Kafka's side, and who checks them.

A row is a (task, n), where `n` counts up per task in commit order. Whoever breaks a promise gets a `Broken`.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from cdc_outbox.lsn import format_lsn

Row = tuple[str, int]
OTHER: Row = ("", 0)
"""A row of another table of the publication."""
FIRST_XID = (3 << 32) - 20
"""Where the 32 bits of a Begin overflow after a few transactions."""
FIRST_LSN = 5 << 32
PARTITIONS = 2
COVERAGE: tuple[str | None, ...] = ("1", "16384", "16390", "700", "16391", "701")


class Broken(AssertionError):
    """A promise was broken."""


@dataclass(slots=True)
class Committed:
    final_lsn: int
    end_lsn: int
    xid: int
    rows: list[Row]
    visible: bool = False


@dataclass(slots=True)
class Postgres:
    """The WAL as transactions in commit order, the slot, the checkpoint and the dead letters."""

    wal: int = FIRST_LSN
    transactions: list[Committed] = field(default_factory=list)
    home: dict[Row, Committed] = field(default_factory=dict)
    values: dict[Row, bytes] = field(default_factory=dict)
    rows: dict[bytes, Row] = field(default_factory=dict)
    confirmed: int = FIRST_LSN
    """The slot's."""
    checkpoint: int = FIRST_LSN
    coverage: tuple[str | None, ...] = COVERAGE
    dead_letters: set[Row] = field(default_factory=set)
    _counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def commit(self, sizes: list[tuple[str, int]]) -> None:
        """One transaction with a row per (task, size of its value); an empty task is another table's row."""
        rows = []
        for task, size in sizes:
            row = OTHER
            if task:
                row = (task, self._counts[task])
                self._counts[task] += 1
                value = b"%s %d" % (task.encode(), row[1])
                self.values[row] = value.ljust(size)
                self.rows[self.values[row]] = row
            rows.append(row)
        final_lsn = self.wal + 40
        self.wal = final_lsn + 48
        committed = Committed(final_lsn, self.wal, FIRST_XID + len(self.transactions), rows)
        self.transactions.append(committed)
        self.home.update((row, committed) for row in rows if row != OTHER)

    def snapshot(self) -> str:
        xmax = FIRST_XID + len(self.transactions)
        running = [each.xid for each in self.transactions if not each.visible]
        return f"{running[0] if running else xmax}:{xmax}:{','.join(map(str, running))}"

    def end_of_rows(self) -> int:
        return max((each.end_lsn for each in self.home.values()), default=0)


@dataclass(slots=True)
class Kafka:
    """The topic, and what it takes. Stores only what keeps the order."""

    postgres: Postgres
    limit: int
    own_limit: int
    dead_letters: bool
    """Rows that are too large may be passed over."""
    stored: set[Row] = field(default_factory=set)
    records: int = 0
    _next: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _last: dict[tuple[int, str], int] = field(default_factory=dict)

    def refuses(self, row: Row) -> bool:
        size = len(self.postgres.values[row])
        return size > self.limit or size > self.own_limit

    def store(self, producer: int, row: Row) -> None:
        """`producer`: whose record it is. Between two of its rows of a task none is missing."""
        task, n = row
        self.records += 1
        last = self._last.get((producer, task))
        if last is not None and self._passing(task, last + 1) < n:
            raise Broken(f"row {n} of {task} came right after row {last}")
        self._last[producer, task] = n
        if row not in self.stored:
            if self._passing(task, self._next[task]) != n:
                raise Broken(f"row {n} of {task} overtook row {self._next[task]}")
            self.stored.add(row)
            self._next[task] = n + 1

    def _passing(self, task: str, n: int) -> int:
        """The first row from `n` on that has to be stored."""
        while self.dead_letters and (task, n) in self.postgres.home and self._passed_over((task, n)):
            n += 1
        return n

    def _passed_over(self, row: Row) -> bool:
        return row in self.postgres.dead_letters or (row not in self.stored and self.refuses(row))


@dataclass(slots=True)
class Promises:
    """Asked at the moments at which they could be broken."""

    postgres: Postgres
    kafka: Kafka
    _safe: int = 0
    """Transactions from the beginning all of whose rows have been found where they belong."""

    def may_be_produced(self, row: Row) -> None:
        if not self.postgres.home[row].visible:
            raise Broken(f"{row} was produced before it was visible")

    def may_be_confirmed(self, position: int) -> None:
        """Nothing that is not in Kafka, and the checkpoint first."""
        if position > self.postgres.checkpoint:
            raise Broken(f"{format_lsn(position)} was reported and not stored in the checkpoint")
        transactions = self.postgres.transactions
        while self._safe < len(transactions) and transactions[self._safe].final_lsn < position:
            for row in transactions[self._safe].rows:
                self.has_arrived(row, "was confirmed")
            self._safe += 1

    def may_be_set_aside(self, row: Row) -> None:
        if not self.kafka.refuses(row):
            raise Broken(f"{row} was set aside, and Kafka would have taken it")

    def has_arrived(self, row: Row, what: str) -> None:
        if row != OTHER and row not in self.kafka.stored and row not in self.postgres.dead_letters:
            raise Broken(f"{row} {what} and is not in Kafka")

    def everything_arrived(self) -> None:
        for row in self.postgres.home:
            self.has_arrived(row, "was committed")
