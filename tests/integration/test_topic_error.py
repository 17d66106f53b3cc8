"""What the start says about a topic, asked of a real broker: librdkafka's mock makes any topic."""

import pytest

from cdc_outbox.kafka import KafkaProducer
from tests.fix_kafka import Broker, CreateTopic


def topic_error(broker: Broker, topic: str) -> str | None:
    producer = KafkaProducer(broker.bootstrap, {})
    try:
        return producer.topic_error(topic, 10)
    finally:
        producer.close(0)


def test_a_topic_that_is_there_has_no_error(broker: Broker, topic: CreateTopic) -> None:
    assert topic_error(broker, topic(partitions=2)) is None


@pytest.mark.kafka_only  # tansu makes any topic that is asked for
def test_a_missing_topic_is_told(broker: Broker) -> None:
    assert topic_error(broker, "never_made") == "Broker: Unknown topic or partition"
