"""The producer, with librdkafka's own mock broker where a broker is needed."""

import logging
import time
from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError, KafkaException, Message

from cdc_outbox.embedded import free_port
from cdc_outbox.errors import ConfigError, DeliveryFailed, RecordRefused
from cdc_outbox.kafka import DEFAULTS, NEVER, ONLY, KafkaProducer, failure, unsafe_properties
from cdc_outbox.kafka_log import QuietLog
from tests.waiting import eventually

MOCK = {"test.mock.num.brokers": "1"}


@pytest.fixture
def producer() -> Iterator[KafkaProducer]:
    made = KafkaProducer("", MOCK)
    yield made
    made.close(5)


@pytest.mark.parametrize("name", sorted(NEVER))
def test_a_property_that_is_the_relays_own_is_refused_by_name(name: str) -> None:
    assert unsafe_properties({name: "x"}) == [f"-X {name}: not to be set, {NEVER[name]}"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("acks", "1"),
        ("acks", "0"),
        ("request.required.acks", "1"),
        ("topic.request.required.acks", "1"),
        ("enable.idempotence", "false"),
        ("partitioner", "consistent_random"),
        ("partitioner", "random"),
        ("delivery.report.only.error", "true"),
        ("queuing.strategy", "lifo"),
        ("enable.gapless.guarantee", "false"),
    ],
)
def test_a_value_that_would_break_a_promise_is_refused_with_those_that_would_not(name: str, value: str) -> None:
    (problem,) = unsafe_properties({name: value})
    assert problem.startswith(f"-X {name}={value}: would break a promise (")
    assert "allowed: " in problem


@pytest.mark.parametrize("name", sorted(ONLY))
def test_every_value_that_keeps_the_promise_passes(name: str) -> None:
    for value in ONLY[name][0]:
        assert unsafe_properties({name: value}) == []
        assert unsafe_properties({name: value.upper()}) == []


def test_our_own_defaults_keep_the_promises() -> None:
    assert unsafe_properties(DEFAULTS) == []
    assert DEFAULTS["acks"] == "all"
    assert DEFAULTS["message.timeout.ms"] == "0"


def test_other_properties_pass_and_each_bad_one_is_told() -> None:
    given = {"linger.ms": "0", "acks": "1", "security.protocol": "SASL_SSL", "transactional.id": "x"}
    assert [problem.split(":")[0] for problem in unsafe_properties(given)] == ["-X acks=1", "-X transactional.id"]


@pytest.mark.parametrize(
    ("properties", "named"),
    [
        ({"no.such.property": "1"}, "no.such.property"),
        ({"batch.size": "big"}, "batch.size"),
        ({"acks": "7000000"}, "acks"),
    ],
)
def test_a_property_that_librdkafka_does_not_take_is_a_configuration_error_that_names_it(
    properties: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        KafkaProducer("127.0.0.1:1", properties)
    assert str(caught.value).startswith("-X: ")
    assert named in str(caught.value)


def test_a_delivered_record_is_reported_once_without_an_error(producer: KafkaProducer) -> None:
    reports: list[tuple[KafkaError | None, Message]] = []
    headers: list[tuple[str, str | bytes | None]] = [("id", b"7"), ("none", None)]

    def report(error: KafkaError | None, message: Message) -> None:
        reports.append((error, message))

    producer.produce("jobs", b'{"price": 1.10}', b"key", -1, report, None, 1_704_067_200_000, headers)
    assert len(producer) >= 1  # a log line that waits counts too
    eventually(lambda: producer.poll(0.05) and reports)
    ((error, message),) = reports
    assert error is None
    assert (message.topic(), message.offset()) == ("jobs", 0)
    assert len(producer) == 0


def test_reports_come_only_from_poll_in_the_callers_thread(producer: KafkaProducer) -> None:
    reports: list[object] = []
    for _ in range(100):
        producer.produce("jobs", b"v", b"k", -1, lambda error, _: reports.append(error), None, 0, [])
    assert reports == []
    eventually(lambda: producer.poll(0.05) is not None and len(reports) == 100)
    assert reports == [None] * 100


def test_null_values_and_null_keys_are_delivered(producer: KafkaProducer) -> None:
    reports: list[object] = []
    producer.produce("jobs", None, None, -1, lambda error, _: reports.append(error), None, 0, [])
    eventually(lambda: producer.poll(0.05) and reports)
    assert reports == [None]


def test_a_full_queue_is_a_buffer_error_and_the_record_can_be_tried_again() -> None:
    producer = KafkaProducer("", {**MOCK, "queue.buffering.max.messages": "1", "linger.ms": "0"})
    done: list[object] = []

    def produce() -> None:
        producer.produce("jobs", b"v", b"k", -1, lambda error, _: done.append(error), None, 0, [])

    produce()
    with pytest.raises(BufferError):
        produce()
    eventually(lambda: producer.poll(0.05) and done)
    produce()
    eventually(lambda: producer.poll(0.05) and len(done) == 2)
    assert done == [None, None]
    producer.close(5)


def test_a_record_above_our_own_limit_is_refused_when_it_is_produced() -> None:
    producer = KafkaProducer("", {**MOCK, "message.max.bytes": "2000", "batch.size": "2000"})
    assert producer.own_size_limit == 2000
    with pytest.raises(KafkaException) as caught:
        producer.produce("jobs", b"x" * 3000, b"k", -1, lambda *_: None, None, 0, [])
    assert isinstance(failure(caught.value.args[0]), RecordRefused)
    producer.close(5)


def test_a_topic_that_is_there_has_no_error(producer: KafkaProducer) -> None:
    assert producer.topic_error("jobs", 5) is None  # the mock broker makes topics as they are asked for


def test_no_answer_about_a_topic_is_no_error_of_the_topic() -> None:
    producer = KafkaProducer(f"127.0.0.1:{free_port()}", {})
    assert producer.topic_error("jobs", 0.2) is None
    producer.close(0)


def test_a_broker_that_is_down_is_noticed() -> None:
    producer = KafkaProducer(f"127.0.0.1:{free_port()}", {})
    eventually(lambda: producer.poll(0.05) is not None and producer.down)
    assert producer.fatal is None
    producer.close(0)


def test_closing_gives_up_what_was_not_delivered_within_the_time_given() -> None:
    producer = KafkaProducer(f"127.0.0.1:{free_port()}", {})
    reports: list[KafkaError | None] = []
    producer.produce("jobs", b"v", b"k", -1, lambda error, _: reports.append(error), None, 0, [])
    began = time.monotonic()
    producer.close(0.1)
    assert time.monotonic() - began < 5
    assert [error.name() for error in reports if error] == ["_PURGE_QUEUE"]
    assert len(producer) == 0


@pytest.mark.parametrize("code", [KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG, KafkaError.INVALID_RECORD])
def test_what_is_wrong_with_the_record_itself_is_refused_for_good(code: int) -> None:
    assert type(failure(KafkaError(code))) is RecordRefused


@pytest.mark.parametrize(
    "code",
    [
        KafkaError._MSG_TIMED_OUT,
        KafkaError._TIMED_OUT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
        KafkaError._PURGE_QUEUE,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._AUTHENTICATION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
        KafkaError.POLICY_VIOLATION,
        KafkaError.UNKNOWN,
    ],
)
def test_anything_else_is_sent_again(code: int) -> None:
    error = failure(KafkaError(code))
    assert type(error) is DeliveryFailed
    assert error.retry
    assert KafkaError(code).name() in str(error)


def test_a_burst_of_one_kind_of_log_line_is_let_through_once(caplog: pytest.LogCaptureFixture) -> None:
    quiet = QuietLog()
    with caplog.at_level(logging.INFO, logger="cdc_outbox.kafka"):
        for number in range(1000):
            quiet.logger.error("FAIL [thrd:%d]: connection refused (after %dms)", number, number)
            quiet.say(f"connection refused (after {number}ms) (_TRANSPORT)")
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("WARNING", "Kafka: connection refused (after 0ms)")


def test_another_kind_of_line_is_not_held_back(caplog: pytest.LogCaptureFixture) -> None:
    quiet = QuietLog()
    with caplog.at_level(logging.INFO, logger="cdc_outbox.kafka"):
        for _ in range(3):
            quiet.logger.warning("FAIL [a]: refused")
            quiet.logger.error("ERROR [a]: something else")
            quiet.say("1/1 brokers are down", "DOWN")
    told = [record.getMessage() for record in caplog.records]
    assert told == ["Kafka: refused", "ERROR [a]: something else", "Kafka: 1/1 brokers are down"]


def test_a_kind_of_line_comes_again_after_a_while_that_doubles_up_to_a_minute() -> None:
    quiet = QuietLog()
    assert quiet._due("FAIL")
    eventually(lambda: quiet._due("FAIL"), 3, "a second line after about a second")
    intervals = []
    for _ in range(8):
        interval = quiet._next["FAIL"][1]
        intervals.append(interval)
        quiet._next["FAIL"] = (0.0, interval)  # as if that long had passed
        assert quiet._due("FAIL")
        assert not quiet._due("FAIL")
        assert quiet._next["FAIL"][0] == pytest.approx(time.monotonic() + interval, abs=0.5)
    assert intervals == [4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0]
