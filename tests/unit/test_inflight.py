"""The ledger against an oracle that keeps everything and recomputes the safe position from scratch.

The same schedules must find each of the broken ledgers below, or they would prove nothing.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc_outbox.errors import ProtocolError
from cdc_outbox.inflight import InFlight, Transaction


@dataclass(slots=True)
class Entry:
    """What the server sent: a transaction, or a keepalive between two."""

    end_lsn: int | None
    """None while a transaction is open."""
    handle: Transaction | None = None
    rows: int = 0
    delivered: int = 0


class Oracle:
    def __init__(self) -> None:
        self.entries: list[Entry] = []

    @property
    def open(self) -> Entry | None:
        return self.entries[-1] if self.entries and self.entries[-1].end_lsn is None else None

    def safe(self) -> tuple[int, int, list[Transaction]]:
        """The position that may be confirmed, the same for transactions with rows, and those, in order."""
        position = relayed = 0
        passed = []
        for entry in self.entries:
            if entry.end_lsn is None or entry.delivered < entry.rows:
                break
            position = max(position, entry.end_lsn)
            if entry.rows and entry.handle is not None:
                relayed = max(relayed, entry.end_lsn)
                passed.append(entry.handle)
        return position, relayed, passed


class Schedule:
    """Plays numbers as a stream and its delivery reports, asserting the ledger's invariants after each step."""

    def __init__(self, ledger: InFlight) -> None:
        self.ledger = ledger
        self.oracle = Oracle()
        self.wal = 0
        self.final_lsn = 0
        self.passed: list[Transaction] = []

    def play(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            before = self.ledger.confirmable
            choice, detail = number % 8, number // 8
            if choice == 0:
                self.advance()
            elif choice == 1:
                self.keepalive(detail)
            elif choice <= 4:
                self.deliver(detail)
            else:
                self.stream(detail)
            safe, _, _ = self.oracle.safe()
            assert before <= self.ledger.confirmable <= safe
        self.finish()

    def stream(self, detail: int) -> None:
        """The next message that the server may send: Begin, Insert or Commit."""
        entry = self.oracle.open
        if entry is None:
            self.wal += 1 + detail % 5
            self.final_lsn = self.wal
            handle = self.ledger.begin(self.final_lsn, 0)
            self.oracle.entries.append(Entry(None, handle))
        elif detail % 3:
            entry.rows += 1
            assert entry.handle is not None
            entry.handle.rows += 1
            entry.handle.unacknowledged += 1
        else:
            self.commit(entry)

    def commit(self, entry: Entry) -> None:
        self.wal += 1
        entry.end_lsn = self.wal
        self.ledger.commit(self.final_lsn, self.wal)

    def keepalive(self, detail: int) -> None:
        """Of the server's present end, or an older one."""
        self.wal += detail % 3
        wal_end = max(0, self.wal - detail % 4)
        self.ledger.keepalive(wal_end)
        if self.oracle.open is None:
            self.oracle.entries.append(Entry(wal_end))

    def deliver(self, detail: int) -> None:
        """A report of any row of any transaction, the open one included."""
        waiting = [entry for entry in self.oracle.entries if entry.delivered < entry.rows]
        if waiting:
            self.deliver_one(waiting[detail % len(waiting)])

    def deliver_one(self, entry: Entry) -> None:
        entry.delivered += 1
        assert entry.handle is not None
        entry.handle.unacknowledged -= 1

    def advance(self) -> None:
        self.passed += self.ledger.advance()
        assert (self.ledger.confirmable, self.ledger.relayed, self.passed) == self.oracle.safe()
        assert self.ledger.idle == (len(self.passed) == self.with_rows() and self.oracle.open is None)

    def with_rows(self) -> int:
        return sum(1 for entry in self.oracle.entries if entry.rows)

    def finish(self) -> None:
        """Everything ends well: nothing may be left behind."""
        if self.oracle.open is not None:
            self.commit(self.oracle.open)
        for entry in self.oracle.entries:
            while entry.delivered < entry.rows:
                self.deliver_one(entry)
        self.advance()
        assert self.ledger.idle
        assert self.ledger.oldest is None
        assert self.ledger.confirmable == max((entry.end_lsn or 0 for entry in self.oracle.entries), default=0)


@settings(max_examples=500)
@given(st.lists(st.integers(0, 8 * 60 - 1), max_size=150))
def test_only_the_end_of_the_acknowledged_prefix_is_ever_confirmable(numbers: list[int]) -> None:
    Schedule(InFlight()).play(numbers)


class ConfirmsWhatWasEnqueued(InFlight):
    def advance(self) -> list[Transaction]:
        for transaction in self._transactions:
            self.confirmable = max(self.confirmable, transaction.end_lsn)
        return super().advance()


class CountsAKeepaliveAtOnce(InFlight):
    def keepalive(self, wal_end: int) -> None:
        super().keepalive(wal_end)
        if self.open is None:
            self.confirmable = max(self.confirmable, wal_end)


class CountsAKeepaliveInsideATransaction(InFlight):
    def keepalive(self, wal_end: int) -> None:
        transaction, self.open = self.open, None
        super().keepalive(wal_end)
        self.open = transaction


class ConfirmsTheLatestInsteadOfThePrefix(InFlight):
    def advance(self) -> list[Transaction]:
        done = [transaction.end_lsn for transaction in self._transactions if not transaction.unacknowledged]
        passed = super().advance()
        self.confirmable = max([self.confirmable, *done])
        return passed


class ConfirmsAnOpenTransaction(InFlight):
    def advance(self) -> list[Transaction]:
        passed = super().advance()
        if self.open is not None and not self.open.unacknowledged and not self._transactions:
            self.confirmable = max(self.confirmable, self.open.final_lsn)
        return passed


class MergesATransactionWithRowsIntoAQuietOne(InFlight):
    def _append(self, transaction: Transaction) -> None:
        if self._transactions and not self._transactions[-1].rows:
            self._transactions[-1].end_lsn = transaction.end_lsn
        else:
            super()._append(transaction)


class GoesDown(InFlight):
    def advance(self) -> list[Transaction]:
        passed = super().advance()
        if passed:
            self.confirmable = passed[-1].end_lsn
        return passed


class ForgetsAKeepaliveWhileRowsAreInFlight(InFlight):
    def keepalive(self, wal_end: int) -> None:
        if not self._transactions:
            super().keepalive(wal_end)


class ConfirmsTheCommitsBeginning(InFlight):
    def commit(self, commit_lsn: int, end_lsn: int) -> None:
        super().commit(commit_lsn, end_lsn)
        self._transactions[-1].end_lsn = commit_lsn


@pytest.mark.parametrize("broken", InFlight.__subclasses__())
def test_the_schedules_find_every_broken_ledger(broken: type[InFlight]) -> None:
    def found(seed: int) -> bool:
        chance = random.Random(seed)
        try:
            Schedule(broken()).play([chance.randrange(8 * 60) for _ in range(150)])
        except AssertionError:
            return True
        return False

    assert any(found(seed) for seed in range(50))


def test_a_keepalive_counts_in_its_place_in_the_order() -> None:
    ledger = InFlight()
    transaction = ledger.begin(10, 0)
    transaction.rows = transaction.unacknowledged = 1
    ledger.commit(10, 11)
    ledger.keepalive(20)
    assert ledger.advance() == []
    assert ledger.confirmable == 0
    transaction.unacknowledged = 0
    assert ledger.advance() == [transaction]
    assert (ledger.confirmable, ledger.relayed) == (20, 11)


def test_a_keepalive_inside_a_transaction_says_nothing() -> None:
    ledger = InFlight()
    ledger.begin(10, 0)
    ledger.keepalive(50)
    ledger.advance()
    assert ledger.confirmable == 0
    ledger.commit(10, 11)
    ledger.advance()
    assert ledger.confirmable == 11


def test_an_empty_ledger_is_idle_and_confirms_nothing() -> None:
    ledger = InFlight()
    assert ledger.advance() == []
    assert (ledger.confirmable, ledger.relayed, ledger.idle, ledger.oldest) == (0, 0, True, None)


def test_the_oldest_is_the_first_not_acknowledged_the_open_one_included() -> None:
    ledger = InFlight()
    first = ledger.begin(10, 0)
    assert ledger.oldest is first
    first.rows = first.unacknowledged = 1
    ledger.commit(10, 11)
    second = ledger.begin(20, 0)
    assert ledger.oldest is first
    first.unacknowledged = 0
    ledger.advance()
    assert ledger.oldest is second
    assert not ledger.idle


def test_many_keepalives_and_empty_transactions_take_one_entry() -> None:
    ledger = InFlight()
    transaction = ledger.begin(1, 0)
    transaction.rows = transaction.unacknowledged = 1
    ledger.commit(1, 2)
    for position in range(10, 20_000, 2):
        ledger.keepalive(position)
        ledger.begin(position, 0)
        ledger.commit(position, position + 1)
    assert len(ledger._transactions) == 2
    transaction.unacknowledged = 0
    ledger.advance()
    assert ledger.confirmable == 19_999


def test_a_begin_inside_a_transaction_is_a_protocol_error() -> None:
    ledger = InFlight()
    ledger.begin(10, 0)
    with pytest.raises(ProtocolError, match="Begin inside"):
        ledger.begin(20, 0)


@pytest.mark.parametrize(("commit_lsn", "end_lsn"), [(9, 12), (11, 12), (10, 10), (10, 9)])
def test_a_commit_that_does_not_match_its_begin_is_a_protocol_error(commit_lsn: int, end_lsn: int) -> None:
    ledger = InFlight()
    ledger.begin(10, 0)
    with pytest.raises(ProtocolError, match="does not match"):
        ledger.commit(commit_lsn, end_lsn)


def test_a_commit_without_a_begin_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="does not match"):
        InFlight().commit(10, 11)
