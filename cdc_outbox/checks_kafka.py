"""What `doctor` checks of Kafka. To add a check, add a function: see finding.py."""

from __future__ import annotations

from functools import cached_property

from cdc_outbox.config import Settings
from cdc_outbox.errors import ConfigError, OutboxError
from cdc_outbox.event import topic_columns
from cdc_outbox.facts import Facts
from cdc_outbox.finding import Checks, Finding, fail, ok, skip, warn
from cdc_outbox.kafka import KafkaProducer
from cdc_outbox.kafka_topic import Cluster, Topic
from cdc_outbox.statements import identifier
from cdc_outbox.status_text import size

ROWS_MEASURED = 10_000

_LARGEST = """
select max(octet_length(args::text)), count(*) from (select {args} as args from {outbox} limit $1) measured"""


class Kafka:
    """`postgres` is None when it cannot be asked."""

    def __init__(self, settings: Settings, postgres: Facts | None) -> None:
        self.settings = settings
        self.postgres = postgres
        self.is_template = bool(topic_columns(settings.topic))

    @cached_property
    def own_size_limit(self) -> int:
        """Raises ConfigError for a property that `stream` would not take."""
        producer = KafkaProducer(self.settings.bootstrap_servers, self.settings.properties)
        producer.close(0)
        return producer.own_size_limit

    @cached_property
    def cluster(self) -> Cluster:
        return Cluster(self.settings.bootstrap_servers, self.settings.properties)

    @cached_property
    def brokers(self) -> int | OutboxError:
        try:
            return self.cluster.brokers()
        except OutboxError as error:
            return error

    @cached_property
    def topic(self) -> Topic | Finding:
        """Or why it cannot be told."""
        if self.is_template:
            return skip(f"{self.settings.topic}: the topics' names depend on the rows")
        if isinstance(self.brokers, OutboxError):
            return skip("no broker answers")
        found = self.cluster.topic(self.settings.topic)
        return skip("no topic") if found is None else found


check = Checks[Kafka]()


@check("producer settings")
def producer_settings(kafka: Kafka) -> Finding:
    try:
        limit = f"records up to {size(kafka.own_size_limit)}"
    except ConfigError as error:
        return fail(str(error), "give that -X a value that librdkafka takes")
    own = ", ".join(f"{name}={value}" for name, value in sorted(kafka.settings.properties.items()) if _harmless(name))
    return ok(f"acks=all, idempotent, murmur2, {limit}" + (f"; {own}" if own else ""))


def _harmless(name: str) -> bool:
    """Security settings are not shown: a password could be among them."""
    return not name.startswith(("sasl.", "ssl."))


@check("Kafka")
def reachable(kafka: Kafka) -> Finding:
    if isinstance(kafka.brokers, ConfigError):
        return skip("there is no producer to try it with")
    if isinstance(kafka.brokers, OutboxError):
        return fail(
            f"no broker answers at {kafka.settings.bootstrap_servers}: {kafka.brokers}",
            "name others with --bootstrap-servers, or mend what -X says of TLS and SASL",
        )
    return ok(f"{kafka.brokers} broker{'s' if kafka.brokers != 1 else ''}")


@check("topic")
def topic(kafka: Kafka) -> Finding:
    found = kafka.topic
    name = kafka.settings.topic
    if isinstance(found, Finding):
        if found.found != "no topic":
            return found
        create = f"kafka-topics.sh --bootstrap-server {kafka.settings.bootstrap_servers} --create --topic {name}"
        return fail(f"{name} does not exist, or is hidden from this client", f"{create}, or another one with --topic")
    if found.leaderless:
        return fail(f"{found.leaderless} of {found.partitions} partitions of {name} have no leader", "mend the cluster")
    return ok(f"{name}: {found.partitions} partitions")


@check("topic's copies")
def copies(kafka: Kafka) -> Finding:
    found = kafka.topic
    if isinstance(found, Finding):
        return found
    least = found.settings.get("min.insync.replicas", "not told")
    words = f"{found.replicas} replicas, min.insync.replicas {least}"
    if found.replicas < 2 or least == "1":
        return warn(f"{words}: a row may be purged when one broker has it", "3 replicas and min.insync.replicas=2")
    return ok(words)


@check("topic's clean-up")
def clean_up(kafka: Kafka) -> Finding:
    found = kafka.topic
    if isinstance(found, Finding):
        return found
    policy = found.settings.get("cleanup.policy", "")
    if "compact" in policy:
        return warn(
            f"cleanup.policy={policy}: of the jobs with one key (its task, or the row's own) only the last stays",
            f"kafka-configs.sh --alter --topic {found.name} --add-config cleanup.policy=delete",
        )
    return ok(f"cleanup.policy={policy}") if policy else skip("the broker does not tell")


@check("permission to write")
def may_write(kafka: Kafka) -> Finding:
    found = kafka.topic
    if isinstance(found, Finding):
        return found
    if found.may_write is None:
        return skip("the broker does not tell")
    if not found.may_write:
        return fail(f"not authorised to write to {found.name}", "grant this client Write and Describe on the topic")
    return ok("granted")


@check("largest row")
def largest_row(kafka: Kafka) -> Finding:
    """Of the rows that are in the table, up to a number: against what client and topic take."""
    found = kafka.topic
    if isinstance(found, Finding):
        return found
    client = kafka.own_size_limit
    told = found.settings.get("max.message.bytes")
    limits = f"limits: {client:,} bytes here" + (
        f", {int(told):,} in the topic" if told else ", the topic's is not told"
    )
    if kafka.postgres is None:
        return skip(f"Postgres does not answer; {limits}")
    query = _LARGEST.format(
        args=identifier(kafka.settings.record_format().column("args")), outbox=kafka.postgres.table.outbox
    )
    largest, measured = (int(value or 0) for value in kafka.postgres.ask(query, [ROWS_MEASURED])[0])
    words = f"{size(largest)}, of {measured:,} rows looked at; {limits}"
    if largest > min(client, int(told or client)):
        return fail(
            words,
            f"kafka-configs.sh --alter --topic {found.name} --add-config max.message.bytes=N"
            " and -X message.max.bytes=N, or --on-poison dead-letter",
        )
    return ok(words)
