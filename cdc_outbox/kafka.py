"""The only producer. Records go in; delivery reports come out of `poll`, in the same thread."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient, ClusterMetadata, ConfigResource  # type: ignore[attr-defined]  # not in its __all__
from confluent_kafka.cimpl import NewTopic

from cdc_outbox.errors import ConfigError, DeliveryFailed, OutboxError, PreconditionError, RecordRefused
from cdc_outbox.kafka_log import QuietLog
from cdc_outbox.logs import hide

log = logging.getLogger("cdc_outbox.kafka")

ProduceError = KafkaException
DeliveryError = KafkaError
Delivered = Message
FullQueue = BufferError
"""What `produce` raises: the record cannot be sent (see `failure`); the queue is full, so poll and try it again."""

Report = Callable[[KafkaError | None, Message], None]

DEFAULTS: Mapping[str, str] = {
    "acks": "all",
    "enable.idempotence": "true",
    # Kafka refuses whole batches. The next batch would be stored all the same, and what was refused would come after
    # what followed it: so a refusal ends this producer, before it sends anything more.
    "enable.gapless.guarantee": "true",
    # What Java clients use: equal keys meet on one partition whoever produced them.
    "partitioner": "murmur2_random",
    # Retried for ever: librdkafka would drop a record after 5 minutes of outage.
    "message.timeout.ms": "0",
    "compression.codec": "lz4",  # lowers the CPU of all threads together (measured): fewer bytes to send
    "linger.ms": "5",
    "batch.size": "1000000",
    "queue.buffering.max.kbytes": "32768",
    # One in flight takes 1.3 kB where each row is a transaction of its own (measured): 27 MB at most. More gain
    # nothing: what waits for long has left the processor's caches, and costs up to a third more (measured).
    "queue.buffering.max.messages": "20000",
    "topic.metadata.propagation.max.ms": "5000",
    "reconnect.backoff.max.ms": "5000",
    "client.id": "cdc-outbox",
    "statistics.interval.ms": "0",
}

ONLY: Mapping[str, tuple[frozenset[str], str]] = {
    "acks": (frozenset({"all", "-1"}), "a row is purged once Kafka has it for good"),
    "request.required.acks": (frozenset({"all", "-1"}), "a row is purged once Kafka has it for good"),
    "enable.idempotence": (frozenset({"true", "1"}), "without it a retry can reorder records"),
    "partitioner": (
        frozenset({"murmur2", "murmur2_random"}),
        "equal keys must meet on one partition whoever produced them",
    ),
    "delivery.report.only.error": (frozenset({"false", "0"}), "the relay confirms by delivery reports"),
    "queuing.strategy": (frozenset({"fifo"}), "order is kept"),
    "enable.gapless.guarantee": (frozenset({"true", "1"}), "nothing overtakes a batch that was refused"),
}
"""Properties that would break a promise, the values that would not, and the promise."""

NEVER: Mapping[str, str] = {
    "bootstrap.servers": "use --bootstrap-servers",
    "metadata.broker.list": "use --bootstrap-servers",
    "transactional.id": "the relay does not use Kafka's transactions",
    "dr_cb": "it is a callback of the relay's own",
    "dr_msg_cb": "it is a callback of the relay's own",
    "on_delivery": "it is a callback of the relay's own",
    "error_cb": "it is a callback of the relay's own",
    "logger": "it is a callback of the relay's own",
    "default.topic.config": "give its properties themselves",
    "enable.background.events": "delivery reports run in the relay's own thread",
}

_NUMERIC = re.compile(r"\.(ms|bytes|kbytes|messages|size)$")
_SECRET = re.compile(r"password|secret|\.pem$|^sasl\.oauthbearer\.config$")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_FILES = frozenset({"ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.keystore.location"})

REFUSED_FOR_GOOD = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_RECORD,
    }
)
"""Error codes by which Kafka says that this record will never do. Anything else is retried for ever, in order."""

REFUSALS: Mapping[int, str] = {
    KafkaError._AUTHENTICATION: "look at -X sasl.mechanism, sasl.username and sasl.password",
    KafkaError._SSL: "look at -X ssl.ca.location, and whether the broker's certificate bears the name it is called by",
}
"""Error codes by which a connection is refused for good, and where to look."""
ASK_SECONDS = 1.0
"""A refusal is heard of this soon; a handshake goes on meanwhile."""

QUESTION_SECONDS = 5.0
"""To wait for an answer about a topic."""
MOMENT_SECONDS = 0.1
"""The loop can wait so long while nothing can be sent."""

MISSING_TOPIC = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC})

ONE_BY_ONE: Mapping[str, str] = {"linger.ms": "0", "enable.gapless.guarantee": "false"}
"""For records of which each is acknowledged before the next is produced: then there is nothing to overtake."""


def unsafe_properties(properties: Mapping[str, str]) -> list[str]:
    """One sentence for each property that would break a promise, or that librdkafka would misread or not explain."""
    problems = []
    for name, value in properties.items():
        plain = name.removeprefix("topic.") if name.startswith("topic.request.") else name
        if _NUMERIC.search(name) and not _NUMBER.fullmatch(value):
            # librdkafka takes 30s for 30, which are milliseconds.
            problems.append(f"-X {name}={value}: write a plain number; its unit is in the property's name")
        if name in _FILES and not os.access(value, os.R_OK):
            problems.append(f"-X {name}={value}: there is no such file, or it cannot be read")
        if plain in NEVER:
            problems.append(f"-X {name}: not to be set, {NEVER[plain]}")
        elif plain in ONLY and value.lower() not in ONLY[plain][0]:
            allowed, promise = ONLY[plain]
            problems.append(
                f"-X {name}={value}: would break a promise ({promise}); allowed: {', '.join(sorted(allowed))}"
            )
    return problems


class KafkaProducer:
    """librdkafka's producer with the relay's settings. `poll` runs the delivery reports."""

    def __init__(
        self,
        bootstrap_servers: str,
        properties: Mapping[str, str],
        *,
        size_limit: int | None = None,
        one_by_one: bool = False,
    ) -> None:
        """No connection is made yet. Raises ConfigError for a property or value that librdkafka does not take.

        `size_limit`: no batch is larger (a single record may be). `one_by_one`: see ONE_BY_ONE.
        """
        hide(*(value for name, value in properties.items() if _SECRET.search(name)))
        self._quiet = QuietLog()
        self.fatal: str | None = None
        self.down = False
        self._refusal: KafkaError | None = None
        self._asking: AdminClient | None = None
        self._may_hurry = not {"linger.ms", "queue.buffering.max.ms"} & properties.keys()
        self._config = {**DEFAULTS, **properties, "bootstrap.servers": bootstrap_servers}
        if size_limit is not None and size_limit < int(self._config["batch.size"]):
            self._config["batch.size"] = str(size_limit)
        if one_by_one:
            self._config.update(ONE_BY_ONE)
        try:
            self._producer = Producer({**self._config, "error_cb": self._error}, logger=self._quiet.logger)
        except KafkaException as error:
            from cdc_outbox.librdkafka_names import meant  # for whoever mistyped one

            raise ConfigError(f"-X: {_reason(error.args[0])}", meant(properties)) from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"-X: {error}") from None
        self.produce = self._producer.produce
        """librdkafka's own, uncopied, since it is called once a row: (topic, value, key, partition, callback, None,
        timestamp, headers). Raises BufferError when the queue is full: poll, then try the same record again."""

    def poll(self, timeout: float) -> int:
        """Run the delivery reports that are there, waiting at most `timeout` seconds for the first; how many."""
        try:
            return self._producer.poll(timeout)
        except KafkaException as error:  # so confluent-kafka tells of a fatal error, whatever its error_cb
            self.fatal = _reason(error.args[0])
            return 1

    def send_now(self) -> None:
        """Send what is in the queue without lingering, unless the operator chose how long to linger; and run the
        reports that come within a millisecond.

        librdkafka lingers for nobody while a flush lasts (1.8, #3494); a millisecond is the least that it takes.
        """
        try:
            if self._may_hurry:
                self._producer.flush(0.001)
        except KafkaException as error:
            self.fatal = _reason(error.args[0])

    def __len__(self) -> int:
        """Records not yet acknowledged, and reports not yet served."""
        return len(self._producer)

    def topic_error(self, topic: str | None, timeout: float) -> str | None:
        """What is wrong with `topic`, or None: it is there, or no broker answered within `timeout` seconds. Without a
        topic it only asks whether a broker lets us in.

        Raises PreconditionError if it does not: waiting mends neither a password nor a certificate.
        """
        metadata = self._metadata(topic, timeout)
        found = metadata.topics.get(topic) if metadata is not None and topic is not None else None
        if found is None or found.error is None:
            return None
        code = found.error.code()
        if code in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_EXCEPTION):
            return str(found.error.str())
        return None

    def _metadata(self, topic: str | None, timeout: float) -> ClusterMetadata | None:
        """None if no broker answers. The question itself fails with no more than a time-out: why, `error_cb` tells."""
        deadline = time.monotonic() + timeout
        which = {} if topic is None else {"topic": topic}
        self._quiet.muted = True
        try:
            while True:
                try:
                    found: ClusterMetadata = self._producer.list_topics(**which, timeout=min(ASK_SECONDS, timeout))
                    return found
                except KafkaException as error:
                    self._producer.poll(0)
                    if self._refusal is not None:
                        raise refused(self._refusal) from None
                    if time.monotonic() >= deadline:
                        self.down = True
                        reason = self._quiet.last_failure or _reason(error.args[0])
                        log.warning("Kafka does not answer yet: %s; if it runs, look at -X security.protocol", reason)
                        return None
        finally:
            self._quiet.muted = False

    def create_topic(self, topic: str, partitions: int, replication: int) -> str | None:
        """Why it could not be created, or None: it is there now. -1 is the broker's default."""
        admin = self._admin()  # its answers end with it
        try:
            admin.create_topics([NewTopic(topic, partitions, replication)], request_timeout=5)[topic].result(6)
        except KafkaException as error:
            return None if error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS else _reason(error.args[0])
        except (TimeoutError, ValueError) as error:
            return str(error) or "no answer"
        return None

    @property
    def own_size_limit(self) -> int:
        """librdkafka refuses a larger record at `produce`; compression does not count."""
        return int(self._config.get("message.max.bytes", 1_000_000))

    @property
    def queue_limit(self) -> int:
        """Bytes that the queue holds; a record larger than that never finds room, though it be empty (measured)."""
        return 1024 * int(self._config["queue.buffering.max.kbytes"])

    @property
    def batch_size(self) -> int:
        return int(self._config["batch.size"])

    def size_limit(self, topic: str) -> int | None:
        """The topic's `max.message.bytes`, where the broker tells."""
        try:
            return SizeQuestion(self._admin(), topic, lambda: None).answer(QUESTION_SECONDS + 1)
        except TimeoutError:
            return None

    def ask_size_limit(self, topic: str, answered: Callable[[], None]) -> SizeQuestion:
        """The same without waiting; `answered` is called in another thread."""
        self._asking = self._asking or self._admin()
        return SizeQuestion(self._asking, topic, answered)

    def answers(self, topic: str) -> bool:
        """Whether a broker tells of `topic` within a moment."""
        try:
            self._producer.list_topics(topic, timeout=MOMENT_SECONDS)
        except KafkaException:
            return False
        return True

    def _admin(self) -> AdminClient:
        producer_only = {*DEFAULTS} - {"client.id", "reconnect.backoff.max.ms"}
        return AdminClient(
            {name: value for name, value in self._config.items() if name not in producer_only},
            logger=self._quiet.logger,
        )

    def close(self, seconds: float) -> None:
        """Send nothing more, wait for what is on its way, for at most `seconds`, and end it: nothing of it may
        arrive after what its successor sends."""
        self._quiet.muted = True
        self._asking = None
        self._producer.purge(in_queue=True, in_flight=False, blocking=True)
        self._serve_reports(seconds)
        self._producer.purge(in_queue=True, in_flight=True, blocking=True)
        self._serve_reports(1)

    def _serve_reports(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self) and (left := deadline - time.monotonic()) > 0:
            self.poll(left)

    def _error(self, error: KafkaError) -> None:
        if error.code() in REFUSALS:
            self._refusal = error
        elif error.code() == KafkaError._ALL_BROKERS_DOWN:
            self.down = True
            self._quiet.say(_reason(error), "DOWN")
            return
        self._quiet.say(_reason(error))


class SizeQuestion:
    """A topic's `max.message.bytes`, asked of the broker."""

    def __init__(self, admin: AdminClient, topic: str, answered: Callable[[], None]) -> None:
        self.topic = topic
        self._admin = admin  # its answers end with it
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        self._entries = admin.describe_configs([resource], request_timeout=QUESTION_SECONDS)[resource]
        self._entries.add_done_callback(lambda _: answered())

    @property
    def answered(self) -> bool:
        return bool(self._entries.done())

    def answer(self, timeout: float = 0.0) -> int | None:
        """None if the broker does not tell. Raises TimeoutError: it is away, or silent, or nobody is the controller."""
        try:
            return int(self._entries.result(timeout)["max.message.bytes"].value)
        except KafkaException as error:
            if error.args[0].code() == KafkaError._TIMED_OUT:
                raise TimeoutError from None
            return None
        except (KeyError, TypeError, ValueError):
            return None


def failure(error: KafkaError) -> OutboxError:
    """What a failed delivery means: RecordRefused if this record will never do, else DeliveryFailed (try again).

    Not by `retriable()`: it says False of a timeout (measured).
    """
    if error.code() in REFUSED_FOR_GOOD:
        return RecordRefused(_reason(error))
    return DeliveryFailed(f"Kafka did not take a record: {_reason(error)}")


def refused(error: KafkaError) -> PreconditionError:
    return PreconditionError(f"Kafka refuses this client: {_reason(error)}", REFUSALS[error.code()])


def is_missing_topic(error: KafkaError) -> bool:
    return error.code() in MISSING_TOPIC


def is_too_large(error: KafkaError) -> bool:
    return error.code() == KafkaError.MSG_SIZE_TOO_LARGE


def _reason(error: KafkaError) -> str:
    return f"{error.str()} ({error.name()})"
