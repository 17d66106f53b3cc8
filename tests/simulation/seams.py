"""The relay's seams, scripted: connections to the modelled servers, the clock, the wake-ups.

Each call first lets the world act, which may kill the process. A dead process does nothing more: every call raises.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException

from cdc_outbox.errors import ConnectionLost, SlotInUse
from cdc_outbox.lsn import format_lsn, parse_lsn
from cdc_outbox.query import ANSWER_SECONDS
from tests.simulation import wire
from tests.simulation.model import COVERAGE, OTHER, PARTITIONS, Broken, Committed, Row

if TYPE_CHECKING:
    from tests.simulation.world import World

Answer = list[tuple[str | None, ...]]
OURS, NEIGHBOUR = 16384, 16385
TIMEOUT_SECONDS = 40.0
"""wal_sender_timeout."""


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        self.now += 1e-6
        return self.now

    def time(self) -> float:
        return 1_700_000_000 + self.now


class Wakeup:
    def __init__(self, world: World) -> None:
        self._world = world
        self.stop_requested = False

    def wait(self, interests: object, timeout: float) -> None:
        self._world.wait(timeout)

    def nudge(self) -> None: ...


@dataclass(slots=True)
class Question:
    doing: str
    parameters: Sequence[object]
    answered: Callable[[Answer], None]
    answer: Answer | None = None
    """From when the server has executed it."""
    arrived: bool = False


class Queries:
    """One question at a time is executed, then its answer travels."""

    deadline = float("inf")
    """Nobody loses patience."""

    def __init__(self, world: World, notified: Callable[[str], None] | None) -> None:
        self._world = world
        self._notified = notified
        self.waiting: deque[Question] = deque()
        self.notices: deque[str] = deque()
        self.cut = False
        world.queries = self

    @property
    def idle(self) -> bool:
        return not self.waiting

    def ask(
        self,
        query: str,
        parameters: Sequence[object],
        answered: Callable[[Answer], None],
        doing: str,
        seconds: float = ANSWER_SECONDS,
    ) -> None:
        self._world.act()
        self.waiting.append(Question(doing, parameters, answered))

    def call(self, query: str, parameters: Sequence[object] = (), *, doing: str, seconds: float = 0.0) -> Answer:
        answers: list[Answer] = []
        self.ask(query, parameters, answers.append, doing)
        while not answers:
            self.wait()
        return answers[0]

    def wait_until(self, answered: Callable[[], bool], doing: str) -> None:
        while not answered():
            self.wait()

    def wait(self, seconds: float = ANSWER_SECONDS) -> None:
        """As at a start, which is many questions and soon over, or there would be time for nothing else."""
        if self._world.likely(0.9):
            self.execute()
            self.deliver()
        else:
            self._world.wait(seconds)
        self.service()

    def service(self) -> None:
        self._world.act()
        if self.cut:
            raise ConnectionLost("SQL: cut")
        while self.notices and self._notified is not None:
            self._notified(self.notices.popleft())
        while self.waiting and self.waiting[0].arrived:
            question = self.waiting.popleft()
            question.answered(question.answer or [])

    def interest(self) -> list[tuple[int, int]]:
        return []

    def close(self) -> None:
        self._world.alive()
        self._world.end_of(self)

    # -- the server's side ----------------------------------------------------------------------------------------

    def execute(self) -> None:
        """The oldest question, if it has not been."""
        if self.waiting and self.waiting[0].answer is None and not self.cut:
            self.waiting[0].answer = self._answer(self.waiting[0])

    def deliver(self) -> None:
        if self.waiting and self.waiting[0].answer is not None:
            self.waiting[0].arrived = True

    def _answer(self, question: Question) -> Answer:
        world, postgres = self._world, self._world.postgres
        match question.doing:
            case "looking for table outbox":
                return [(str(OURS), "public", "outbox", "r")]
            case "asking for settings":
                return [("false", "logical", str(int(TIMEOUT_SECONDS * 1000)), "180000", format_lsn(postgres.wal))]
            case "reading pg_replication_slots":
                slot = {"slot_type": "logical", "plugin": "pgoutput", "database": "d", "temporary": False}
                slot |= {"two_phase": False, "confirmed_flush_lsn": format_lsn(postgres.confirmed)}
                return [(json.dumps(slot), "d")]
            case "reading the checkpoint":
                return [(format_lsn(postgres.checkpoint), *COVERAGE, *postgres.coverage)]
            case "storing the checkpoint":
                postgres.checkpoint = max(postgres.checkpoint, parse_lsn(str(question.parameters[1])))
                return [(format_lsn(postgres.checkpoint),)]
            case "storing a dead letter":
                row = postgres.rows[json.loads(str(question.parameters[4]))["args"].encode()]
                world.promises.may_be_set_aside(row)
                postgres.dead_letters.add(row)
                return []
            case "asking for a snapshot":
                return [(postgres.snapshot(),)]
            case "looking for domains":
                return [("17",)]
            case "reading the WAL position":
                world.caught_up_at = postgres.wal
                return [(format_lsn(postgres.wal),)]
            case "notifying":
                postgres.wal += 64
                return []
            case "preparing the session" | "listening for purges":
                return []
            case "asking who holds the slot":
                return [("pid 1",)]
            case doing:
                raise NotImplementedError(doing)


class Replication:
    """A walsender and the way to it. It sends what is not confirmed as of its start."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._stream: deque[bytes] = deque()
        self._inbox: deque[bytes] = deque()
        self._updates: deque[tuple[int, bool]] = deque()
        self._cursor = 0
        self._known: set[int] = set()
        self._sent = self._reported = 0
        self._end = 0
        """Where the transaction being sent ends."""
        self.started = self.cut = False
        self.last_update: float | None = None

    def start(self, slot: str, publication: str) -> None:
        self._world.act()
        if self._world.slot_is_held():
            raise SlotInUse("the slot is in use")
        postgres = self._world.postgres
        self._sent = self._reported = postgres.confirmed
        self._cursor = sum(each.final_lsn < postgres.confirmed for each in postgres.transactions)
        self.started = True
        self._world.replication = self

    def receive(self) -> bytes | None:
        self._world.act()
        if self._inbox:
            return self._inbox.popleft()
        if self.cut:
            raise ConnectionLost("replication: cut")
        return None

    def send_status(self, written: int, flushed: int, *, reply_requested: bool = False) -> None:
        self._world.act()
        if flushed < self._reported:
            raise Broken("a confirmed position went down")
        if max(written, flushed) > self._sent:
            raise Broken("a position was reported that the server has not sent")
        self._world.promises.may_be_confirmed(flushed)
        self._reported = flushed
        self.last_update = self._world.clock.now
        if not self.cut:
            self._updates.append((flushed, reply_requested))

    def interest(self, *, reading: bool = True) -> list[tuple[int, int]]:
        return []

    def finish(self, deadline: float) -> None:
        self._world.alive()
        while self._updates and not self.cut:
            self.take_update()
        self.close()

    def close(self) -> None:
        self._world.alive()
        self._world.end_of(self)

    # -- the server's side ----------------------------------------------------------------------------------------

    def take_update(self) -> None:
        if self._updates:
            flushed, reply_requested = self._updates.popleft()
            self._world.postgres.confirmed = max(self._world.postgres.confirmed, flushed)
            if reply_requested:
                self.keepalive(reply_requested=False)

    @property
    def updates(self) -> int:
        return len(self._updates)

    def send(self) -> bool:
        """One message more is on its way; False if there is none."""
        transactions = self._world.postgres.transactions
        if not self._stream:
            if self._cursor == len(transactions):
                return False
            self._queue(transactions[self._cursor])
            self._cursor += 1
        self._inbox.append(self._stream.popleft())
        if not self._stream:
            self._sent = max(self._sent, self._end)
        return True

    def keepalive(self, *, reply_requested: bool) -> None:
        """Everything below its position has been sent; unless it comes amid a transaction."""
        postgres = self._world.postgres
        position = postgres.wal
        if not self._stream and self._cursor < len(postgres.transactions):
            position = postgres.transactions[self._cursor].final_lsn
        self._sent = max(self._sent, position)
        self._inbox.append(wire.keepalive(position, reply_requested))

    def _queue(self, transaction: Committed) -> None:
        self._end = transaction.end_lsn
        self._stream.append(wire.begin(transaction.final_lsn, transaction.xid))
        for row in transaction.rows:
            oid, name = (NEIGHBOUR, "neighbour") if row == OTHER else (OURS, "outbox")
            if oid not in self._known or self._world.likely(0.1):
                self._known.add(oid)
                self._stream.append(wire.relation(oid, "public", name, ["id", "task", "args"]))
            task, n = row
            value = self._world.postgres.values.get(row, b"")
            self._stream.append(wire.insert(oid, [b"%d" % n, task.encode(), value]))
        self._stream.append(wire.commit(transaction.final_lsn, transaction.end_lsn))


@dataclass(slots=True)
class InQueue:
    row: Row
    report: Callable[[KafkaError | None, Delivered], None]
    size: int


class Delivered:
    """As much of a message as a report is asked for."""

    @staticmethod
    def topic() -> str:
        return "outbox"


DELIVERED = Delivered()
Batch = list[InQueue]
TIMED_OUT, REFUSED, PURGED, OUT_OF_ORDER = (
    KafkaError(code)
    for code in (
        KafkaError._MSG_TIMED_OUT,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError._PURGE_QUEUE,
        KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
    )
)


class SizeQuestion:
    """It takes its time; often Kafka is away, now and then it does not tell."""

    def __init__(self, producer: Producer, topic: str) -> None:
        self.topic = topic
        self._producer = producer
        self._world = producer.world

    @property
    def answered(self) -> bool:
        self._world.act()
        return self._world.likely(0.5)

    def answer(self) -> int | None:
        if self._world.likely(0.2):
            raise TimeoutError  # and it does not answer either
        limit = self._producer.size_limit(self.topic)
        if limit is None:
            self._producer.limit_is_untold()
        return limit


class Producer:
    """Per partition: a queue, batches on the wire, batches stored whose acknowledgement travels."""

    def __init__(self, world: World, size_limit: int | None, one_by_one: bool) -> None:
        self.world = world
        self.number = world.count_producer()
        self.batch_size = min(size_limit or 1_000_000, 1_000_000)
        self._gapless = not one_by_one
        self._most_in_flight = 5
        self.queues: list[deque[InQueue]] = [deque() for _ in range(PARTITIONS)]
        self.wires: list[deque[Batch]] = [deque() for _ in range(PARTITIONS)]
        self.acknowledged: list[deque[Batch]] = [deque() for _ in range(PARTITIONS)]
        self._known = [False] * PARTITIONS
        """Whether the broker has seen this producer in the partition: else it takes any sequence number."""
        self._gaps = [False] * PARTITIONS
        """Whether the broker waits for a batch that will not come."""
        self._reports: deque[tuple[InQueue, KafkaError | None]] = deque()
        self._count = 0
        self.delivered: set[Row] = set()
        self.failed = False
        """It sends nothing more."""
        self.fatal: str | None = None
        self.down = False
        self.own_size_limit = world.kafka.own_limit
        self.queue_limit = 1 << 25
        world.producer = world.newest_producer = self

    def __len__(self) -> int:
        return self._count

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int,
        report: Callable[[KafkaError | None, Delivered], None],
        unused: None,
        timestamp: int,
        headers: object,
    ) -> None:
        world = self.world
        world.act()
        row = world.postgres.rows[value or b""]
        world.promises.may_be_produced(row)
        if self._count >= world.room:
            raise BufferError
        size = len(value or b"")
        if size > self.own_size_limit:
            raise KafkaException(REFUSED)
        self._count += 1
        self.queues[ord(row[0][-1]) % PARTITIONS].append(InQueue(row, report, size))

    def poll(self, timeout: float) -> int:
        self.world.act()
        if timeout and not self._reports:
            self.world.wait(timeout)
        served = 0
        while self._reports:
            record, error = self._reports.popleft()
            self._count -= 1
            served += 1
            if error is None:
                self.delivered.add(record.row)
            record.report(error, DELIVERED)
        return served

    def send_now(self) -> None:
        for partition in range(PARTITIONS):
            if self.world.likely(0.5):
                self.transmit(partition)
        self.poll(0.001)

    def topic_error(self, topic: str, timeout: float) -> str | None:
        return None

    def size_limit(self, topic: str) -> int | None:
        self.world.act()
        return None if self.world.likely(0.1) else self.world.kafka.limit

    def ask_size_limit(self, topic: str, answered: Callable[[], None]) -> SizeQuestion:
        return SizeQuestion(self, topic)

    def answers(self, topic: str) -> bool:
        return False

    def limit_is_untold(self) -> None:
        """Not modelled: where nobody tells the topic's limit, a batch may overtake a producer's first one that is
        refused for its size."""
        self._most_in_flight = 1

    def close(self, seconds: float) -> None:
        """What is on the wire may still arrive, also after this."""
        self.world.alive()
        self.failed = True
        for partition, queue in enumerate(self.queues):
            self._tell(list(queue), PURGED)
            queue.clear()
            while seconds and self.wires[partition] and self.world.likely(0.5):
                self.store(partition)
                self.acknowledge(partition)
            for batch in [*self.acknowledged[partition], *self.wires[partition]]:
                self._tell(batch, PURGED)
        self.poll(0)
        self.world.end_of(self)

    # -- the broker's side ----------------------------------------------------------------------------------------

    def transmit(self, partition: int, most: int = 4) -> None:
        queue, wire = self.queues[partition], self.wires[partition]
        if self.failed or not queue or len(wire) >= self._most_in_flight:
            return
        batch = [queue.popleft()]
        size = batch[0].size
        while queue and len(batch) < most and size + queue[0].size <= self.batch_size:
            size += queue[0].size
            batch.append(queue.popleft())
        wire.append(batch)

    def store(self, partition: int) -> None:
        """The broker takes or refuses the batch that is next."""
        if not self.wires[partition]:
            return
        batch = self.wires[partition].popleft()
        if self._gaps[partition]:
            self._fail(batch, OUT_OF_ORDER)
        elif sum(record.size for record in batch) > self.world.kafka.limit:
            self._gaps[partition] = self._known[partition] and self._gapless
            self._fail(batch, REFUSED)
        else:
            self._known[partition] = True
            for record in batch:
                self.world.kafka.store(self.number, record.row)
            self.acknowledged[partition].append(batch)

    def acknowledge(self, partition: int) -> None:
        if self.acknowledged[partition]:
            self._tell(self.acknowledged[partition].popleft(), None)

    def time_out(self, partition: int) -> None:
        """The oldest batch is given up by the client, whether the broker has it or not."""
        if self.acknowledged[partition]:
            self._fail(self.acknowledged[partition].popleft(), TIMED_OUT)
        elif self.wires[partition]:
            self._gaps[partition] = True
            self._fail(self.wires[partition].popleft(), TIMED_OUT)

    def on_the_wire(self) -> list[tuple[int, list[Row]]]:
        """What the broker may still store once this producer is gone: in each partition, from the beginning on."""
        found = []
        for batches, gap in zip(self.wires, self._gaps, strict=True):
            whole = [batch for batch in batches if sum(record.size for record in batch) <= self.world.kafka.limit]
            if not gap and len(whole) == len(batches):
                some = whole[: self.world.chance.randrange(len(whole) + 1)]
                found += [(self.number, [record.row for record in batch]) for batch in some]
        return found

    def _fail(self, batch: Batch, error: KafkaError) -> None:
        self._tell(batch, error)
        if self._gapless:
            self.failed = True
            self.world.disturbed = True
            if error is OUT_OF_ORDER:
                self.fatal = "out of order"

    def _tell(self, batch: Batch, error: KafkaError | None) -> None:
        self._reports.extend((record, error) for record in batch)
