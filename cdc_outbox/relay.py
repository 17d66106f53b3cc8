"""Crash-only: whatever fails in a session, the next one is built from the slot. There is no other recovery path."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cdc_outbox.backoff import Backoff
from cdc_outbox.config import Settings
from cdc_outbox.conninfo import complete_conninfo
from cdc_outbox.errors import (
    BatchRefused,
    DeliveryFailed,
    GapError,
    OutboxError,
    PreconditionError,
    SlotInUse,
    Stopped,
    TopicMissing,
)
from cdc_outbox.event import topic_columns
from cdc_outbox.kafka import KafkaProducer
from cdc_outbox.metrics import Figures
from cdc_outbox.query import server_is_starting
from cdc_outbox.session import Session
from cdc_outbox.topic_gate import TopicGate
from cdc_outbox.wakeup import Wakeup

log = logging.getLogger("cdc_outbox.relay")

RESTART_SECONDS = (0.1, 5.0)
"""Back-off between sessions: streaming resumes well within 10 s of what it waited for."""
CLOSE_SECONDS = 2.0
TOPIC_SECONDS = 5.0


class Relay:
    """Runs sessions until one ends well, or fails in a way that only an operator can mend."""

    def __init__(
        self,
        settings: Settings,
        wakeup: Wakeup,
        figures: Figures,
        *,
        relayed: Callable[[], None] = lambda: None,
        recover: Callable[[], None] | None = None,
    ) -> None:
        """`relayed` is called after each confirmation; `recover` does what `init-slot` would (--on-gap recover).

        Raises ConfigError for options that libpq or librdkafka do not take, before anything is touched.
        """
        self.settings = settings
        self.wakeup = wakeup
        self.figures = figures
        self.relayed = relayed
        self.recover = recover
        self.conninfo = complete_conninfo(settings.dsn)
        self.size_limits: dict[str, int] = {}
        """The max.message.bytes of the topics that we know it of."""
        self.suspect: int | None = None
        """Kafka refused a batch with rows of the transaction that has this final_lsn, and not for the batch's size."""
        self.isolated = False
        """Everything before `suspect` is relayed and confirmed."""
        self.started = False
        self._session: Session | None = None
        self._new_producer().close(0)

    def fail(self, error: OutboxError) -> None:
        """Drain, then end the session with `error`; for other threads. Between sessions there is nothing to end:
        the next one finds out for itself."""
        if self._session is not None:
            self._session.halt = error
            self.wakeup.nudge()

    def run(self) -> None:
        """Returns after a drain or a stop. Raises the OutboxError that ended it."""
        backoff = Backoff(*RESTART_SECONDS)
        while not self.wakeup.stop_requested:
            try:
                if self._run_session(backoff):
                    break
            except Stopped:
                break
            except OutboxError as error:
                self.figures.enter("failed", str(error))
                self.figures.note(error)
                self._after(error, backoff)
        self.figures.enter("stopped")

    def _run_session(self, backoff: Backoff) -> bool:
        """True when there is nothing more to do."""
        one_by_one = self.isolated
        producer = self._new_producer(one_by_one=one_by_one)
        if not self.started and self._check_topic(producer):
            producer = self._new_producer()
        session = self._session = Session(
            self.settings,
            self.conninfo,
            self.wakeup,
            self.figures,
            producer,
            topic_gate := TopicGate(producer, self.size_limits, self.wakeup.nudge),
            suspect=None if one_by_one else self.suspect,
            one_by_one=one_by_one,
            relayed=self.relayed,
        )
        try:
            session.open()
            self.started = True
            backoff.reset()
            session.run()
        finally:
            self._session = None
            self.figures.streaming = False
            self.figures.in_flight_rows = 0
            session.close()
            # Emptied and gone before the next one starts: nothing late arrives behind what that one sends.
            producer.close(0.0 if self.wakeup.stop_requested else CLOSE_SECONDS)
            # Only now every report is in. The refusal is the cause, whatever came of it first.
            if session.refused is not None and not self.wakeup.stop_requested:
                self._narrow(session.refused, producer)
                raise session.refused
        if session.halt is not None:
            raise session.halt
        if topic_gate.batches_too_large:
            return False  # the next producer makes smaller ones
        if not session.partial:
            return True
        self.isolated, self.suspect = not one_by_one, None if one_by_one else self.suspect
        return False

    def _narrow(self, refused: BatchRefused, producer: KafkaProducer) -> None:
        """Kafka refuses whole batches. First the batch may be too large for the topic, though each record fits. Else
        find the record: relay and confirm what comes before its transaction, then that transaction row by row."""
        if not self._learn_size_limit(refused.topic, producer):
            self.suspect, self.isolated = refused.final_lsn, False

    def _learn_size_limit(self, topic: str, producer: KafkaProducer) -> bool:
        """True if `topic` takes smaller batches than the producer makes."""
        limit = producer.size_limit(topic)
        if limit is None:
            return False
        self.size_limits[topic] = limit
        return limit < producer.batch_size

    def _new_producer(self, *, one_by_one: bool = False) -> KafkaProducer:
        return KafkaProducer(
            self.settings.bootstrap_servers,
            self.settings.properties,
            size_limit=min(self.size_limits.values(), default=None),
            one_by_one=one_by_one,
        )

    def _check_topic(self, producer: KafkaProducer) -> bool:
        """A topic that is missing at the start is an operator's slip, and so is a password or a certificate that Kafka
        does not take; later they are waited for. True if the topic takes smaller batches than the producer makes."""
        topic = self.settings.topic
        if topic_columns(topic):
            producer.topic_error(None, TOPIC_SECONDS)
            return False
        why = producer.topic_error(topic, TOPIC_SECONDS)
        if why is not None and self.settings.create_topics:
            why = self._create_topic(topic, producer)
        if why is not None:
            raise PreconditionError(f"topic {topic}: {why}", "create it, or name another with --topic")
        return not producer.down and self._learn_size_limit(topic, producer)

    def _create_topic(self, topic: str, producer: KafkaProducer) -> str | None:
        """Why it could not be created, or None."""
        why = producer.create_topic(topic, self.settings.topic_partitions, self.settings.topic_replication)
        if why is None:
            log.info("topic %s created", topic)
        return why

    def _create_topics(self, topics: set[str]) -> None:
        producer = self._new_producer()
        for topic in sorted(topics):
            if (why := self._create_topic(topic, producer)) is not None:
                log.warning("topic %s could not be created: %s", topic, why)
        producer.close(0.0)

    def _after(self, error: OutboxError, backoff: Backoff) -> None:
        """Mend, wait, or raise `error`."""
        if isinstance(error, GapError) and self.recover is not None:
            log.warning("%s; recovering, as --on-gap recover says", error)
            try:
                self.recover()
                return
            except OutboxError as failed:
                error = failed
        if not error.retry or (isinstance(error, SlotInUse) and self.settings.no_wait):
            raise error
        if not self.started and not server_is_starting(self.conninfo):
            raise error  # fail fast on first contact, be patient afterwards
        if isinstance(error, TopicMissing) and self.settings.create_topics:
            self._create_topics(error.topics)
        self.figures.reconnects["kafka" if isinstance(error, DeliveryFailed) else "postgres"] += 1
        wait = backoff.next(jitter=True)
        log.warning("%s; starting over from the slot in %.1f s", error, wait)
        self.wakeup.wait((), wait)
