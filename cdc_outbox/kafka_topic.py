"""What the Kafka cluster says of itself and of a topic, for `doctor`: nothing is produced, and no topic comes to be."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import TimeoutError as Overdue
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # not in its __all__
    AclOperation,
    AdminClient,
    ConfigResource,
)

from cdc_outbox.errors import ConfigError, DeliveryFailed, PreconditionError
from cdc_outbox.kafka import ASK_SECONDS, REFUSALS

ANSWER_SECONDS = 5.0
REFUSED = 2


@dataclass(frozen=True, slots=True)
class Topic:
    """`may_write` is None where the broker does not tell; `settings` is empty where it does not."""

    name: str
    partitions: int
    leaderless: int
    replicas: int
    may_write: bool | None
    settings: Mapping[str, str]


class Cluster:
    def __init__(self, bootstrap_servers: str, properties: Mapping[str, str]) -> None:
        """No connection is made yet. Raises ConfigError."""
        self._reason, self._weight = "", 0
        silent = logging.Logger("librdkafka")
        silent.addHandler(logging.NullHandler())
        config = {**properties, "bootstrap.servers": bootstrap_servers, "error_cb": self._error}
        try:
            self._admin = AdminClient(config, logger=silent)  # type: ignore[arg-type]  # its stub knows no error_cb
        except KafkaException as error:
            raise ConfigError(f"-X: {_words(error)}") from None

    def brokers(self) -> int:
        """How many there are. Raises DeliveryFailed saying why none answers."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            try:
                return len(self._admin.list_topics(timeout=ASK_SECONDS).brokers)
            except KafkaException as error:
                self._admin.poll(0)  # an authentication error is told to error_cb only
                if self._weight == REFUSED or time.monotonic() >= deadline:
                    raise DeliveryFailed(self._reason or _words(error)) from None

    def topic(self, name: str) -> Topic | None:
        """None if it does not exist, or is hidden from us. Raises DeliveryFailed, PreconditionError."""
        asked = self._admin.describe_topics(
            TopicCollection([name]), include_authorized_operations=True, request_timeout=ANSWER_SECONDS
        )
        try:
            found = asked[name].result(ANSWER_SECONDS + 1)
        except Overdue:
            raise DeliveryFailed("no answer") from None
        except KafkaException as error:
            code = error.args[0].code()
            if code == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return None
            if code == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise PreconditionError("not authorised to describe it") from None
            raise DeliveryFailed(_words(error)) from None
        operations = found.authorized_operations
        return Topic(
            name,
            partitions=len(found.partitions),
            leaderless=sum(partition.leader is None or partition.leader.id < 0 for partition in found.partitions),
            replicas=min((len(partition.replicas) for partition in found.partitions), default=0),
            may_write=None if operations is None else AclOperation.WRITE in operations,
            settings=self._settings(name),
        )

    def _settings(self, name: str) -> dict[str, str]:
        resource = ConfigResource(ConfigResource.Type.TOPIC, name)
        try:
            asked = self._admin.describe_configs([resource], request_timeout=ANSWER_SECONDS)
            return {key: entry.value for key, entry in asked[resource].result(ANSWER_SECONDS + 1).items()}
        except (KafkaException, Overdue):
            return {}

    def _error(self, error: KafkaError) -> None:
        """A refusal says more than that the connection ended, and anything more than that none is left."""
        weight = REFUSED if error.code() in REFUSALS else error.code() != KafkaError._ALL_BROKERS_DOWN
        if weight >= self._weight:
            self._reason, self._weight = f"{error.str()} ({error.name()})", weight


def _words(error: KafkaException) -> str:
    return f"{error.args[0].str()} ({error.args[0].name()})"
