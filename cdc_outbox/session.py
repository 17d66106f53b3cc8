"""One life of the relay, between connecting and failing. Nothing in it outlives a failure.

    replication -> reader (walsender, pgoutput, event) -> kafka
         ^                                                  |
         +---- confirm <- inflight <---- delivery reports ---+

One thread, one loop. It never waits for one party only: status updates go out on our own timer while Kafka stalls,
while a transaction is not visible yet, while the checkpoint is being stored.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

from cdc_outbox import checkpoint, row_filter
from cdc_outbox.backoff import Backoff
from cdc_outbox.config import Settings
from cdc_outbox.confirm import Confirmation
from cdc_outbox.dead_letter import DeadLetter, insert_sql
from cdc_outbox.errors import (
    BatchRefused,
    ConnectionLost,
    DeliveryFailed,
    OutboxError,
    PreconditionError,
    RecordRefused,
    SlotInUse,
    Stopped,
)
from cdc_outbox.event import RecordFormat
from cdc_outbox.inflight import InFlight, Transaction
from cdc_outbox.kafka import KafkaProducer
from cdc_outbox.lsn import format_lsn, parse_lsn
from cdc_outbox.metrics import Figures
from cdc_outbox.objects import bytea_types, require, require_slot, slot_holder
from cdc_outbox.pgoutput import Relation
from cdc_outbox.query import Queries
from cdc_outbox.reader import Held, Reader
from cdc_outbox.replication import Replication
from cdc_outbox.statements import identifier
from cdc_outbox.topic_gate import TopicGate
from cdc_outbox.visibility import SNAPSHOT_QUERY, VisibilityGate
from cdc_outbox.wakeup import Wakeup
from cdc_outbox.walsender import POSTGRES_EPOCH_SECONDS

log = logging.getLogger("cdc_outbox.session")

STATUS_SECONDS = 10.0
"""Between status updates, or a quarter of wal_sender_timeout if that is less."""
SILENCE = 2.0
"""Status intervals without a word from the server, each of which asked for one, after which it counts as dead."""
REPORT_SECONDS = (0.002, 0.05)
"""How often delivery reports are looked for while the stream is quiet. Rows wake the loop at once."""
GATE_SECONDS = (0.001, 0.1)
"""How often to look whether a transaction has become visible."""
STANDBY_SECONDS = (0.1, 1.0)
CLOSING_SECONDS = 1.5
"""Of --shutdown-timeout, for what comes after the drain: ending the stream, the producer and the metrics' server."""

FACTS = """
select pg_is_in_recovery()::text, current_setting('wal_level'),
       (select setting from pg_settings where name = 'wal_sender_timeout'), current_setting('server_version_num'),
       case when not pg_is_in_recovery() then pg_current_wal_flush_lsn() end"""


class Session:
    def __init__(
        self,
        settings: Settings,
        conninfo: str,
        wakeup: Wakeup,
        figures: Figures,
        producer: KafkaProducer,
        topic_gate: TopicGate,
        *,
        suspect: int | None = None,
        one_by_one: bool = False,
        relayed: Callable[[], None],
    ) -> None:
        """`suspect`: read only what comes before the transaction with this final_lsn. `one_by_one`: see
        Reader. `relayed` is called after each confirmation."""
        self.settings = settings
        self.conninfo = conninfo
        self.wakeup = wakeup
        self.figures = figures
        self.producer = producer
        self.suspect = suspect
        self.one_by_one = one_by_one
        self.topic_gate = topic_gate
        self.partial = False
        """It ends before it has read all that it was asked for."""
        self.relayed = relayed
        self.ledger = InFlight()
        self.gate = VisibilityGate()
        self.halt: OutboxError | None = None
        """Drain, then end with this. Another thread may set it."""
        self.streaming = False
        self._closing: list[Callable[[], None]] = []
        self._renamed = False
        self._poisoned: Transaction | None = None

    # -- opening ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect, hold the slot, and prove that it is the right one. Raises what stands in the way."""
        settings = self.settings
        self.queries = queries = Queries(self.conninfo, self.wakeup, self._notified)
        self._closing.append(queries.close)
        # The store of a position must be durable here and must not wait for a synchronous standby.
        queries.call("set synchronous_commit = local", doing="preparing the session")
        self.objects = require(queries, settings.table, settings.slot, settings.publication)
        self._check_server()
        slot = require_slot(queries, settings.slot)
        self.replication = Replication(self.conninfo, self.wakeup)
        self._closing.append(self.replication.close)
        self._take_slot()
        # Only the holder of the slot can judge it: while another relay has it, it moves.
        slot = require_slot(queries, settings.slot)
        checkpoint.check_now(queries, self.objects)
        if settings.shard is not None:
            row_filter.require(queries, self.objects, settings.shard, settings.record_format())
        queries.call(f"listen {identifier(settings.slot)}", doing="listening for purges")
        self.confirmation = Confirmation(
            self.ledger,
            queries,
            self.replication,
            self.objects,
            confirmed=slot.confirmed_flush_lsn,
            # Each asks for a reply, and so for whether there is WAL that was written since the last check.
            status_seconds=min(self.status_seconds, max(settings.check_every, 1.0)),
            on_confirmed=self._confirmed,
        )
        self.reader = Reader(
            self.replication.receive,
            self.producer,
            self.ledger,
            self.gate,
            self.topic_gate,
            self._record_format(),
            is_ours=self._is_ours,
            set_aside=self._set_aside,
            one_by_one=self.one_by_one,
            endpos=self._end(),
        )
        self.streaming = self.figures.streaming = True
        self.figures.enter("streaming")
        self.figures.confirmed_lsn = self.figures.start_lsn = slot.confirmed_flush_lsn
        log.info(
            "streaming %s through slot %s from %s",
            self.objects.outbox,
            settings.slot,
            format_lsn(slot.confirmed_flush_lsn),
        )
        self.relayed()  # rows of an earlier life may wait for the purge

    def _check_server(self) -> None:
        in_recovery, wal_level, timeout_ms, version, end = self.queries.call(FACTS, doing="asking for settings")[0]
        if in_recovery == "true":
            # Waited for once we have streamed: in a failover the address leads to one that is not promoted yet.
            raise ConnectionLost("this server is a standby", "give the primary's address with --dsn")
        if int(version or 0) < 190000 and wal_level != "logical":
            raise PreconditionError(
                f"wal_level is {wal_level}", "alter system set wal_level = logical, then restart the server"
            )
        self.figures.begin_session(parse_lsn(end or ""))
        timeout = int(timeout_ms or 0) / 1000
        self.status_seconds = min(STATUS_SECONDS, timeout / 4) if timeout else STATUS_SECONDS

    def _record_format(self) -> RecordFormat:
        return dataclasses.replace(self.settings.record_format(), bytea_oids=bytea_types(self.queries))

    def _take_slot(self) -> None:
        """START_REPLICATION; in standby while another process holds the slot."""
        backoff = Backoff(*STANDBY_SECONDS)
        waiting_for = None
        while True:
            try:
                self.replication.start(self.settings.slot, self.settings.publication)
                return
            except SlotInUse:
                holder = slot_holder(self.queries, self.settings.slot)
                if self.settings.no_wait:
                    raise SlotInUse(
                        f"slot {self.settings.slot} is held by {holder}", "stop that relay, or drop --no-wait"
                    ) from None
                if holder != waiting_for:
                    log.info("standby: slot %s is held by %s", self.settings.slot, holder)
                    waiting_for = holder
                self.figures.enter("standby", f"slot {self.settings.slot} is held by {holder}")
            self.wakeup.wait((), backoff.next(jitter=True))
            if self.wakeup.stop_requested:
                raise Stopped("stopped in standby")

    def _end(self) -> int | None:
        endpos = self._endpos()
        self.partial = self.one_by_one
        if self.suspect is not None and (endpos is None or self.suspect < endpos):
            self.partial = True
            return self.suspect
        return endpos

    def _endpos(self) -> int | None:
        if self.settings.endpos is not None:
            return parse_lsn(self.settings.endpos)
        if not self.settings.until_caught_up:
            return None
        rows = self.queries.call("select pg_current_wal_insert_lsn()", doing="reading the WAL position")
        position = parse_lsn(rows[0][0] or "")
        # Its commit flushes the WAL up to there, so that an idle server gets there too.
        self.queries.call("select pg_notify($1, $2)", [self.settings.slot, format_lsn(position)], doing="notifying")
        return position

    # -- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until drained. Raises what ends the session."""
        now = time.monotonic()
        self._reports = Backoff(*REPORT_SECONDS)
        self._gate_backoff = Backoff(*GATE_SECONDS)
        self._snapshot_asked = False
        self._snapshot_due = 0.0
        self._heard = now
        self._check_due = now + self.settings.check_every
        self._checked_at = 0
        self._drain_deadline: float | None = None
        while True:
            now = time.monotonic()
            more = self.reader.read(only_finish=self._draining(now))
            served = self.producer.poll(0)
            self.queries.service()
            self._account()
            self._raise_failures()
            due = min(self._check_coverage(now), self._pass_gate(now), self._check_alive(now), self._confirm(now))
            due = min(due, self.queries.deadline)
            if self._drained():
                return
            # What came in after `read` may let it go on, or end it: nothing else would end a wait for that.
            ending = self._drain_deadline is None and (self._reads_no_further or self.halt is not None)
            if not (more or served or ending):
                self._wait(due)

    def _draining(self, now: float) -> bool:
        """Read no further than to the end of the transaction being read. Only a stop is in a hurry: who asked for
        everything up to a position gets it."""
        hurry = self.wakeup.stop_requested or self.halt is not None
        if hurry and self._drain_deadline in (None, float("inf")):
            limit = self.settings.shutdown_timeout
            self._drain_deadline = now + max(limit - CLOSING_SECONDS, limit / 2)
        elif self._reads_no_further and self._drain_deadline is None:
            self._drain_deadline = float("inf")
        if self._drain_deadline is None:
            return False
        self.figures.enter("draining")
        return True

    @property
    def _reads_no_further(self) -> bool:
        return self.reader.at_end or self.topic_gate.batches_too_large

    def _drained(self) -> bool:
        """Nothing is owed any more, or the time for it is over."""
        if self._drain_deadline is None:
            return False
        if time.monotonic() > self._drain_deadline:
            log.warning("not everything was acknowledged in time; the next start sends it again")
            return True
        transaction = self.ledger.open
        cut_short = self.halt is not None or self.topic_gate.batches_too_large
        reading = transaction is not None and transaction.rows and not cut_short
        # A row that Kafka will never take holds up its own transaction, and what stands before that is awaited.
        nothing_before = self.ledger.oldest is (self._poisoned or transaction)
        return not reading and nothing_before and self.confirmation.settled

    def _account(self) -> None:
        """Move the ledger on and count what it passed."""
        figures = self.figures
        passed = self.ledger.advance()
        if passed:
            now = time.time()
            for transaction in passed:
                figures.relayed_rows += transaction.rows
                figures.relayed_bytes += transaction.bytes
                committed = POSTGRES_EPOCH_SECONDS + transaction.commit_time / 1_000_000
                figures.commit_to_ack.observe(max(0.0, now - committed))
            figures.relayed_transactions += len(passed)
            figures.last_progress = time.monotonic()
            self._reports.reset()
        oldest = self.ledger.oldest
        pending = oldest is not None and (oldest.rows or oldest is self.ledger.open)
        since = POSTGRES_EPOCH_SECONDS + oldest.commit_time / 1_000_000 if oldest and pending else None
        figures.account(self.reader.received_lsn, since)
        figures.in_flight_rows = len(self.producer)

    def _raise_failures(self) -> None:
        for kind, count in self.reader.failures.items():
            self.figures.delivery_failures[kind] += count
            self.reader.failures[kind] = 0
        if self.reader.failure is not None:
            raise self.reader.failure
        if self.producer.fatal is not None:
            raise DeliveryFailed(f"Kafka: {self.producer.fatal}")

    def _pass_gate(self, now: float) -> float:
        """Ask for a snapshot while a transaction waits to become visible; when to ask next."""
        if self.reader.held is not Held.NOT_VISIBLE or self._snapshot_asked:
            return float("inf")
        if now < self._snapshot_due:
            return self._snapshot_due
        if self.gate.visible(self.reader.xid):
            return now  # answered since it was read
        self._snapshot_asked = True

        def answered(rows: list[tuple[str | None, ...]]) -> None:
            self.gate.learn(rows[0][0] or "")
            self._snapshot_asked = False
            if self.gate.visible(self.reader.xid):
                self._gate_backoff.reset()
                self._snapshot_due = 0.0
            else:
                self._snapshot_due = time.monotonic() + self._gate_backoff.next()
            self.figures.visibility_wait_seconds += time.monotonic() - now

        # Nothing on the server can hold this answer up: it is how a half-open connection is noticed.
        seconds = SILENCE * self.status_seconds
        self.queries.ask(SNAPSHOT_QUERY, [], answered, "asking for a snapshot", seconds)
        return float("inf")

    def _check_alive(self, now: float) -> float:
        """Raises ConnectionLost if the server has been silent for too long while we listen."""
        if self.reader.heard or self.reader.held is not None or self._drain_deadline is not None:
            self.reader.heard = False
            self._heard = now
        limit = self._heard + SILENCE * self.status_seconds
        if now > limit:
            raise ConnectionLost(f"no word from Postgres for {now - self._heard:.0f} s")
        return limit

    def _confirm(self, now: float) -> float:
        reply, self.reader.reply_requested = self.reader.reply_requested, False
        return self.confirmation.step(
            self.reader.received_lsn, now, reply=reply, urgent=self._drain_deadline is not None
        )

    def _check_coverage(self, now: float) -> float:
        """About once a minute while WAL is being written: an idle relay asks nothing. When to check next."""
        received = self.reader.received_lsn
        moved = received > self._checked_at
        if (now >= self._check_due and moved) or self._renamed:
            self._renamed = False
            self._check_due = float("inf")

            def passed() -> None:
                self._checked_at = received
                self._check_due = time.monotonic() + self.settings.check_every

            checkpoint.ask_check(self.queries, self.objects, passed)
        return self._check_due if moved else float("inf")

    def _wait(self, due: float) -> None:
        held = self.reader.held
        interests = self.replication.interest(reading=held is None) + self.queries.interest()
        timeout = min(due - time.monotonic(), 60.0)
        if self._drain_deadline is not None:
            timeout = min(timeout, self._drain_deadline - time.monotonic())
        if not len(self.producer):
            self.wakeup.wait(interests, timeout)
        elif self.reader.caught_up:
            # Nothing more is coming that a batch could wait for. While draining, lingering makes larger ones.
            self.reader.caught_up = False
            self.producer.send_now()
        elif held in (Held.QUEUE_FULL, Held.ONE_BY_ONE):
            self.producer.poll(min(max(timeout, 0.0), self._reports.next()))
        else:
            self.wakeup.wait(interests, min(timeout, self._reports.next()))

    # -- what happens on the way ----------------------------------------------------------------------------------

    def _confirmed(self, position: int) -> None:
        self.figures.confirmed_lsn = position
        self.figures.last_confirm = time.time()
        self.figures.last_progress = time.monotonic()
        self.relayed()

    def _notified(self, payload: str) -> None:
        """A purge asks for a position. Anyone may NOTIFY: what is no position is nothing."""
        try:
            position = parse_lsn(payload)
        except ValueError:
            return
        if self.streaming:
            self.confirmation.want(position)

    def _is_ours(self, relation: Relation) -> bool:
        """By name, as it was when the row was written; by oid too, since a rename does not stop its rows."""
        named = (relation.namespace, relation.name) == (self.objects.schema, self.objects.table)
        if relation.oid == self.objects.oid and not named:
            log.warning(
                "the table is now called %s.%s; its rows go on, a new table of the old name would not be covered",
                relation.namespace,
                relation.name,
            )
            self._renamed = True
        return named or relation.oid == self.objects.oid

    def _set_aside(self, transaction: Transaction, letter: DeadLetter) -> None:
        if self.settings.on_poison != "dead-letter":
            self.halt = RecordRefused(
                f"Kafka will never take {letter.describe()}",
                "raise that limit or mend the row's topic, or go on with --on-poison dead-letter;"
                " nothing was confirmed past it",
            )
            self.reader.at_end = True
            self._poisoned = self._poisoned or transaction
            return

        def stored(_: object) -> None:
            transaction.unacknowledged -= 1
            self.figures.dead_letters += 1
            log.warning("dead letter: %s", letter.describe())

        self.queries.ask(insert_sql(self.objects), letter.parameters(), stored, "storing a dead letter")

    @property
    def refused(self) -> BatchRefused | None:
        return self.reader.refused if self.streaming else None

    # -- closing ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End both connections and the producer; after a drain the last status update is taken for certain."""
        if self.streaming and self._drain_deadline is not None:
            soon = time.monotonic() + 0.5
            self.replication.finish(max(soon, min(self._drain_deadline, soon + self.settings.shutdown_timeout)))
        for close in reversed(self._closing):
            close()
