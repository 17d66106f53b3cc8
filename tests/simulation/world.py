"""One schedule: a relay among modelled servers, and everything that happens to it, all from one seed.

The relay is the real one, `Relay` and all that it makes, but for its seams. The world acts whenever the relay calls
one of them, so between any two steps of its loop anything may have happened. When the schedule is over nothing goes
wrong any more, and everything has to arrive.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from cdc_outbox import backoff, confirm, relay, session
from cdc_outbox.config import Settings
from cdc_outbox.errors import ConnectionLost, GapError, RecordRefused
from cdc_outbox.lsn import format_lsn
from cdc_outbox.metrics import Figures
from cdc_outbox.relay import Relay
from tests.simulation.model import PARTITIONS, Broken, Kafka, Postgres, Promises, Row
from tests.simulation.seams import TIMEOUT_SECONDS, Clock, Producer, Queries, Replication, Wakeup

TASKS = ("a", "b", "c")
SMALL, FITS, TOO_LARGE, TOO_LARGE_FOR_US = 150, 2000, 4000, 7000
TOPIC_LIMIT, OWN_LIMIT = 3000, 6000
DRAIN_SECONDS = 8.0
"""A drain that takes no longer is complete."""
STEPS = 50_000
"""Calls of seams between two waits, after which it turns round and round."""
PATIENCE = 2000
"""Waits of the relay, once nothing goes wrong any more, after which it is stuck."""


class Killed(BaseException):
    """kill -9."""


class World:
    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.likely: Callable[[float], bool] = lambda probability: chance.random() < probability
        self.settings = Settings(
            on_poison="dead-letter" if self.likely(0.5) else "halt",
            until_caught_up=self.likely(0.05),
            check_every=chance.choice((2.0, 60.0)),
        )
        self.postgres = Postgres()
        self.kafka = Kafka(self.postgres, TOPIC_LIMIT, OWN_LIMIT, self.settings.on_poison == "dead-letter")
        self.promises = Promises(self.postgres, self.kafka)
        self.clock = Clock()
        self.room = chance.choice((1, 3, 10, 1000))
        self.oversize = chance.choice((0.0, 0.0, 0.05))
        self.late: deque[tuple[int, list[Row]]] = deque()
        self.queries: Queries | None = None
        self.replication: Replication | None = None
        self.producer: Producer | None = None
        self.newest_producer: Producer | None = None
        self.dead = False
        self.calm = False
        self.over = False
        """Everything has arrived: it is asked to stop for the last time."""
        self.gap_expected = False
        self.disturbed = False
        """Since it was asked to stop something went wrong: then it may repeat what it had delivered."""
        self.caught_up_at = 0
        self._producers = 0
        self._held = 0
        self._looks: deque[tuple[int, list[Row]]] = deque()
        self._waits = self._steps = 0
        self._stopped_at: float | None = None
        self._left = chance.randrange(10, 90)
        """Waits of the relay during which things go wrong."""
        self._paces = self._choose_paces()
        self._faults = self._choose_faults()
        self._fault_rate = chance.choice((0.005, 0.03, 0.15))

    def _choose_paces(self) -> list[tuple[float, Callable[[], object]]]:
        """How likely each party does its next bit of work while the relay waits: some are slow, others are not."""
        work = (self.commit, self.show, self.send, self.keepalive, self.update, self.execute, self.deliver)
        parties = (*work, self.transmit, self.store, self.reply)
        slow = self.chance.choice((*parties, None))
        return [(0.05 if each == slow else self.chance.choice((0.3, 0.9)), each) for each in parties]

    def _choose_faults(self) -> list[Callable[[], object]]:
        """Each schedule has its own mixture: some kinds not at all, others again and again."""
        usual = (self.write_elsewhere, self.look, self.time_out, self.cut_stream, self.cut_sql, self.kill, self.stop)
        rare = (self.lower_limit, self.move_slot, self.alter_publication)
        faults: list[Callable[[], object]] = [each for each in usual if self.likely(0.4)]
        return faults + [each for each in rare if self.likely(0.04)]

    # -- running a schedule -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises Broken, or whatever the relay should not have raised."""
        with pytest.MonkeyPatch.context() as patch:
            self._replace_seams(patch)
            while True:
                try:
                    if self._run_process():
                        return
                except Killed:
                    self._bury()
                except RecordRefused:
                    self._mend_poison()
                except GapError:
                    if self.gap_expected:
                        return
                    raise
                except ConnectionLost:
                    self._bury()  # on first contact; whoever runs it starts it again

    def _replace_seams(self, patch: pytest.MonkeyPatch) -> None:
        for module in (session, confirm):
            patch.setattr(module, "time", self.clock)
        patch.setattr(backoff, "random", self.chance)
        patch.setattr(session, "Queries", lambda conninfo, wakeup, notified=None: Queries(self, notified))
        patch.setattr(session, "Replication", lambda conninfo, wakeup: Replication(self))
        patch.setattr(relay, "complete_conninfo", lambda dsn: dsn)  # which costs more than all the rest of a start
        patch.setattr(relay, "server_is_starting", lambda conninfo: False)
        patch.setattr(
            relay,
            "KafkaProducer",
            lambda servers, properties, size_limit=None, one_by_one=False: Producer(self, size_limit, one_by_one),
        )

    def _run_process(self) -> bool:
        """One process of the relay, until it ends; True if that was the end of the schedule."""
        self.dead = False
        self.wakeup = Wakeup(self)
        self._stopped_at = None
        running = Relay(self.settings, self.wakeup, Figures("cdc_outbox"))  # type: ignore[arg-type]  # by its methods
        running.run()
        self._check_end(running.settings.until_caught_up)
        return self.over

    def _check_end(self, until_caught_up: bool) -> None:
        """After a drain that nothing disturbed nothing will be repeated."""
        if self._stopped_at is None:
            if not until_caught_up:
                raise Broken("it ended by itself")
            for transaction in self.postgres.transactions:
                for row in transaction.rows if transaction.final_lsn < self.caught_up_at else []:
                    self.promises.has_arrived(row, "was committed before the start")
        elif self.over:
            self.promises.everything_arrived()
        in_time = self._stopped_at is None or self.clock.now < self._stopped_at + DRAIN_SECONDS
        if self.disturbed or not in_time:
            return
        delivered = self.newest_producer.delivered if self.newest_producer is not None else set()
        for transaction in self.postgres.transactions:
            ours = {row for row in transaction.rows if row in self.postgres.home}
            if ours & delivered and self.postgres.confirmed <= transaction.final_lsn:
                raise Broken(f"after a clean stop {ours} will be repeated")

    def _bury(self) -> None:
        """What a dead process had sent may arrive, from the beginning on, at once or later."""
        producer = self.producer
        if self.queries is not None:
            self.end_of(self.queries)
        if self.replication is not None:
            self.end_of(self.replication)
        if producer is not None:
            self.end_of(producer)

    def _mend_poison(self) -> None:
        """The operator raises the limits, or has the row set aside."""
        if self.settings.on_poison == "dead-letter":
            raise Broken("it halted although it may set rows aside")
        if self.likely(0.5):
            self.kafka.limit = self.kafka.own_limit = 1_000_000
        else:
            self.kafka.dead_letters = True
            self.settings = Settings(on_poison="dead-letter", check_every=self.settings.check_every)

    # -- what the seams call ----------------------------------------------------------------------------------------

    def alive(self) -> None:
        if self.dead:
            raise Killed

    def act(self) -> None:
        """Between any two steps of the relay anything may happen."""
        self.alive()
        self._steps += 1
        if self._steps > STEPS:
            raise Broken("it never waits")
        if not self.calm and self.likely(0.1):
            self.chance.choice(self._paces)[1]()
            self._go_wrong()
        self.alive()

    def wait(self, timeout: float) -> None:
        """Everyone may do something, and time passes: not more than the relay wants to wait."""
        self.alive()
        self._steps = 0
        self._left -= 1
        if self._left > 0:
            for pace, work in self._paces:
                if self.likely(pace):
                    work()
            self._go_wrong()
        else:
            self._settle()
        self.clock.now += max(timeout, 0.0) * (1.0 if self.calm or self.likely(0.2) else 0.1 * self.chance.random())
        self._check_status_updates()
        self.alive()

    def _go_wrong(self) -> None:
        if self._faults and self.likely(self._fault_rate):
            self.chance.choice(self._faults)()

    def _check_status_updates(self) -> None:
        replication = self.replication
        if replication is None or replication.last_update is None or replication.cut:
            return
        if self.clock.now > replication.last_update + TIMEOUT_SECONDS:
            raise Broken("no status update within wal_sender_timeout")

    def slot_is_held(self) -> bool:
        """By what is left of an earlier connection."""
        self._held = max(0, self._held - 1)
        return self._held > 0

    def count_producer(self) -> int:
        self._producers += 1
        return self._producers

    def end_of(self, party: Queries | Replication | Producer) -> None:
        """A connection ends, from whichever side: what was on its way may still be taken."""
        if isinstance(party, Replication):
            while party.updates and self.likely(0.5):
                party.take_update()
            if self.replication is party:
                self._held = self.chance.choice((0, 0, 1, 3))
                self.replication = None
        elif isinstance(party, Queries):
            if self.likely(0.5):
                party.execute()
            if self.queries is party:
                self.queries = None
        elif self.producer is party:
            self.late += party.on_the_wire()
            self.producer = None

    # -- what happens -----------------------------------------------------------------------------------------------

    def commit(self) -> None:
        sizes = []
        for _ in range(self.chance.choice((0, 1, 1, 2, 5))):
            size = SMALL if self.likely(0.9) else FITS
            if self.likely(self.oversize):
                size = self.chance.choice((TOO_LARGE, TOO_LARGE_FOR_US))
            sizes.append((self.chance.choice((*TASKS, "")), size))
        self.postgres.commit(sizes)

    def show(self) -> None:
        """A transaction becomes visible, in whatever order."""
        hidden = [each for each in self.postgres.transactions if not each.visible]
        for transaction in self.chance.sample(hidden, min(len(hidden), self.chance.choice((1, 3, 99)))):
            transaction.visible = True

    def write_elsewhere(self) -> None:
        self.postgres.wal += self.chance.choice((100, 1 << 20, 20 << 20))

    def send(self) -> None:
        if self.replication is not None and not self.replication.cut:
            for _ in range(self.chance.randrange(1, 9)):
                self.replication.send()

    def keepalive(self) -> None:
        if self.replication is not None and not self.replication.cut:
            self.replication.keepalive(reply_requested=self.likely(0.3))

    def update(self) -> None:
        if self.replication is not None:
            self.replication.take_update()

    def execute(self) -> None:
        if self.queries is not None:
            self.queries.execute()

    def deliver(self) -> None:
        if self.queries is not None:
            self.queries.deliver()

    def transmit(self) -> None:
        if self.producer is not None:
            for partition in range(PARTITIONS):
                self.producer.transmit(partition, self.chance.randrange(1, 5))

    def store(self) -> None:
        if self.late and self.likely(0.3):
            self._store_late()
        elif self.producer is not None:
            partition = self.chance.randrange(PARTITIONS)
            for _ in range(self.chance.choice((1, 1, 5))):
                self.producer.store(partition)

    def _store_late(self) -> None:
        producer, rows = self.late.popleft()
        for row in rows:
            self.kafka.store(producer, row)

    def reply(self) -> None:
        """Acknowledgements arrive."""
        if self.producer is not None:
            for partition in range(PARTITIONS):
                self.producer.acknowledge(partition)

    def time_out(self) -> None:
        if self.producer is not None:
            self.producer.time_out(self.chance.randrange(PARTITIONS))

    def cut_stream(self) -> None:
        if self.replication is not None:
            self.replication.cut = self.disturbed = True

    def cut_sql(self) -> None:
        if self.queries is not None:
            self.queries.cut = self.disturbed = True

    def kill(self) -> None:
        self.dead = self.disturbed = True

    def stop(self) -> None:
        """SIGTERM."""
        if self.wakeup.stop_requested:
            return
        self.wakeup.stop_requested = True
        self._stopped_at = self.clock.now
        parties = (self.queries, self.replication)
        self.disturbed = any(party is None or party.cut for party in parties) or self.replication_is_young()
        self.disturbed = self.disturbed or self.producer is None or self.producer.failed

    def replication_is_young(self) -> bool:
        return self.replication is None or self.replication.last_update is None

    def look(self) -> None:
        """A purge looks at the table and asks for a position behind all that it sees."""
        seen = [row for each in self.postgres.transactions if each.visible for row in each.rows]
        fence = self.postgres.wal
        self.postgres.wal += 64
        self._looks.append((fence, seen))
        if self.queries is not None:
            self.queries.notices.append(format_lsn(fence))
        self.delete()

    def delete(self) -> None:
        """Whatever a purge would delete by now must be in Kafka."""
        if self.gap_expected:
            return  # it compares slot and coverage as the relay does
        while self._looks and self._looks[0][0] <= self.postgres.confirmed:
            for row in self._looks.popleft()[1]:
                self.promises.has_arrived(row, "would be purged")

    def lower_limit(self) -> None:
        if self.kafka.limit == TOPIC_LIMIT:
            self.kafka.limit = FITS - 500

    def move_slot(self) -> None:
        """By hand, while nobody reads from it: nothing may go on."""
        if self.replication is None and self.postgres.wal > self.postgres.checkpoint and not self.gap_expected:
            self.postgres.confirmed = self.postgres.wal
            self.gap_expected = True

    def alter_publication(self) -> None:
        if not self.gap_expected:
            self.postgres.coverage = (*self.postgres.coverage[:3], "999", *self.postgres.coverage[4:])
            self.gap_expected = True

    # -- when the schedule is over -----------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Everyone does what they have to do."""
        self.calm = True
        self._waits += 1
        if self._waits > PATIENCE:
            raise Broken("it is stuck")
        self.room = 1000
        for transaction in self.postgres.transactions:
            transaction.visible = True
        while self.late:
            self._store_late()
        self.execute()
        self.deliver()
        self.update()
        self.delete()
        self._settle_stream()
        self._settle_producer()
        if not self.over and self._is_over():
            self.over = True
            self.stop()

    def _settle_stream(self) -> None:
        replication = self.replication
        if replication is not None and not replication.cut:
            while replication.send():
                pass
            if self._waits % 50 == 1:
                self.look()  # a purge asks again until the slot gets there
            if self.gap_expected:
                self.postgres.wal += 100
                self.keepalive()

    def _settle_producer(self) -> None:
        if self.producer is not None:
            for partition in range(PARTITIONS):
                self.producer.transmit(partition)
                self.producer.store(partition)
                self.producer.acknowledge(partition)

    def _is_over(self) -> bool:
        if self.gap_expected or self.wakeup.stop_requested or self.settings.until_caught_up:
            self.settings = Settings(on_poison=self.settings.on_poison, check_every=self.settings.check_every)
            return False
        return self._waits > 2 and not self._looks and self.postgres.confirmed >= self.postgres.end_of_rows()


def run(seed: int) -> None:
    """Raises AssertionError with the seed, from which alone the schedule can be played again."""
    try:
        World(seed).run()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
