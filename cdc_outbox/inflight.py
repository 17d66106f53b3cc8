"""Which WAL position is safe to confirm. PURE.

Transactions arrive in commit order, delivery reports in any order. The only position that may ever be confirmed is
the end of the longest prefix of transactions of which every row has been acknowledged: confirming anything later
would let Postgres forget a row that Kafka does not have.
"""

from __future__ import annotations

from collections import deque

from cdc_outbox.errors import ProtocolError


class Transaction:
    """One transaction, or one keepalive (a transaction without rows), on its way to being confirmable.

    `unacknowledged` is counted down by delivery reports, a million times a second at best: hence a bare attribute.
    """

    __slots__ = ("bytes", "commit_time", "end_lsn", "final_lsn", "rows", "unacknowledged")

    def __init__(self, final_lsn: int, commit_time: int = 0) -> None:
        self.final_lsn = final_lsn
        self.commit_time = commit_time
        self.end_lsn = 0
        self.rows = 0
        self.bytes = 0
        self.unacknowledged = 0


class InFlight:
    """The ledger. Invariants: `confirmable` only goes up; it is 0 or the `end_lsn` of a transaction (or the
    `wal_end` of a keepalive) before which nothing is open or unacknowledged.

    `relayed` is the same, for transactions that carried rows of ours: work whose confirmation is worth a write.
    """

    __slots__ = ("_transactions", "confirmable", "open", "relayed")

    def __init__(self) -> None:
        self._transactions: deque[Transaction] = deque()
        self.open: Transaction | None = None
        self.confirmable = 0
        self.relayed = 0

    def begin(self, final_lsn: int, commit_time: int) -> Transaction:
        if self.open is not None:
            raise ProtocolError("Begin inside a transaction")
        self.open = Transaction(final_lsn, commit_time)
        return self.open

    def commit(self, commit_lsn: int, end_lsn: int) -> None:
        transaction = self.open
        if transaction is None or transaction.final_lsn != commit_lsn or end_lsn <= commit_lsn:
            raise ProtocolError("Commit that does not match its Begin")
        transaction.end_lsn = end_lsn
        self.open = None
        self._append(transaction)

    def keepalive(self, wal_end: int) -> None:
        """The server has sent all there is below `wal_end`: as good as an empty transaction that ends there.

        In its place in the order, it counts only once everything before it is acknowledged. In the middle of a
        transaction it says nothing that the commit will not say.
        """
        if self.open is None:
            marker = Transaction(wal_end)
            marker.end_lsn = wal_end
            self._append(marker)

    def _append(self, transaction: Transaction) -> None:
        last = self._transactions[-1] if self._transactions else None
        if last is not None and not transaction.rows and not last.rows:
            last.end_lsn = max(last.end_lsn, transaction.end_lsn)  # a quiet hour is one entry
        else:
            self._transactions.append(transaction)

    def advance(self) -> list[Transaction]:
        """Move `confirmable` over the acknowledged prefix; the transactions with rows that it passed, in order."""
        passed = []
        transactions = self._transactions
        while transactions and not transactions[0].unacknowledged:
            transaction = transactions.popleft()
            self.confirmable = max(self.confirmable, transaction.end_lsn)
            if transaction.rows:
                self.relayed = max(self.relayed, transaction.end_lsn)
                passed.append(transaction)
        return passed

    @property
    def oldest(self) -> Transaction | None:
        """The first transaction not fully acknowledged, the open one included; None when nothing is in flight."""
        if self._transactions:
            return self._transactions[0]
        return self.open

    @property
    def idle(self) -> bool:
        """Nothing open, nothing in flight, nothing left to move over."""
        return self.open is None and not self._transactions
