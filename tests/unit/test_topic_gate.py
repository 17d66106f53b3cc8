"""Nothing goes to a topic before it is known what that takes, or that nobody tells."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest

from cdc_outbox.kafka import KafkaProducer
from cdc_outbox.topic_gate import TopicGate

AWAY, SILENT = object(), object()


@dataclass
class Question:
    topic: str
    says: object = None
    answered: bool = False

    def answer(self) -> int | None:
        if self.says in (AWAY, SILENT):
            raise TimeoutError
        return cast("int | None", self.says)


@dataclass
class Producer:
    batch_size: int = 1_000_000
    asked: list[Question] = field(default_factory=list)

    def ask_size_limit(self, topic: str, answered: Callable[[], None]) -> Question:
        self.asked.append(Question(topic))
        return self.asked[-1]

    def answers(self, topic: str) -> bool:
        return self.asked[-1].says is SILENT

    def says(self, what: object) -> None:
        self.asked[-1].says, self.asked[-1].answered = what, True


@pytest.fixture
def producer() -> Producer:
    return Producer()


def gate(producer: Producer, limits: dict[str, int] | None = None) -> TopicGate:
    return TopicGate(cast(KafkaProducer, producer), {} if limits is None else limits, lambda: None)


def test_a_topic_is_closed_until_the_broker_has_answered_and_is_asked_once(producer: Producer) -> None:
    topics = gate(producer)
    assert [topics.open("jobs") for _ in range(3)] == [False] * 3
    producer.says(2_000_000)
    assert [topics.open("jobs") for _ in range(3)] == [True] * 3
    assert topics.smallest == 2_000_000
    assert [question.topic for question in producer.asked] == ["jobs"]


def test_what_was_learned_outlives_the_producer(producer: Producer) -> None:
    limits: dict[str, int] = {}
    topics = gate(producer, limits)
    topics.open("jobs")
    producer.says(2_000_000)
    topics.open("jobs")
    assert gate(Producer(), limits).open("jobs")
    assert limits == {"jobs": 2_000_000}


def test_a_topic_that_takes_less_than_a_batch_stays_closed_to_this_producer(producer: Producer) -> None:
    limits = {"large": 2_000_000}
    topics = gate(producer, limits)
    topics.open("small")
    producer.says(20_000)
    assert not topics.open("small")
    assert topics.batches_too_large
    assert topics.smallest == 20_000
    next_one = gate(Producer(batch_size=20_000), limits)
    assert next_one.open("small")
    assert not next_one.batches_too_large


def test_a_topic_whose_limit_nobody_tells_is_open(producer: Producer) -> None:
    topics = gate(producer)
    topics.open("jobs")
    producer.says(None)
    assert topics.open("jobs")
    assert topics.smallest is None
    assert len(producer.asked) == 1


def test_while_kafka_is_away_it_is_asked_again_and_again(producer: Producer) -> None:
    topics = gate(producer)
    for _ in range(3):
        assert not topics.open("jobs")
        producer.says(AWAY)
    assert not topics.open("jobs")
    assert len(producer.asked) == 4
    producer.says(2_000_000)
    assert topics.open("jobs")


def test_a_broker_that_takes_rows_and_does_not_answer_this_is_not_waited_for(producer: Producer) -> None:
    topics = gate(producer)
    topics.open("jobs")
    producer.says(SILENT)
    assert topics.open("jobs")
    assert len(producer.asked) == 1
