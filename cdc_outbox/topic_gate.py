"""Before the first record goes to a topic: what does it take?

Kafka takes any sequence number as a producer's first in a partition. So of two batches on their way there the second
would be stored although the first is refused for its size, and overtake it. Who knows the topic's limit makes no batch
that is larger, and sends what may be larger with nothing else in flight.
"""

from __future__ import annotations

from collections.abc import Callable

from cdc_outbox.kafka import KafkaProducer, SizeQuestion


class TopicGate:
    """Of one producer. Asks each topic's limit once, without waiting; what it learns outlives it, in `limits`."""

    def __init__(self, producer: KafkaProducer, limits: dict[str, int], answered: Callable[[], None]) -> None:
        """`limits`: max.message.bytes by topic. `answered` is called, in another thread, once a question has an end."""
        self._producer = producer
        self._limits = limits
        self._answered = answered
        self._question: SizeQuestion | None = None
        self._untold: set[str] = set()
        """Topics of which the broker does not tell."""
        self.batches_too_large = False
        """For a topic that was met on the way: this producer can send nothing to it."""

    @property
    def smallest(self) -> int | None:
        return min(self._limits.values(), default=None)

    def open(self, topic: str) -> bool:
        """May records go to `topic`? Not before Kafka has answered; while it is away nothing could be sent anyway."""
        if topic in self._limits or topic in self._untold:
            return True
        question = self._question
        if question is None or question.topic != topic:
            self._question = self._producer.ask_size_limit(topic, self._answered)
            return False
        if not question.answered:
            return False
        self._question = None
        try:
            limit = question.answer()
        except TimeoutError:
            if not self._producer.answers(topic):
                return self.open(topic)
            limit = None  # it is there, and takes rows: it only does not tell
        if limit is None:
            self._untold.add(topic)
            return True
        self._limits[topic] = limit
        self.batches_too_large = limit < self._producer.batch_size
        return not self.batches_too_large
