"""Kafka behind TLS and SASL: the right settings relay, the wrong ones are one line at the first contact, and a relay
that has streamed waits until it is let in again. The password is shown nowhere."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.fix_command import get
from tests.fix_kafka import Broker
from tests.relay_rig import metrics_url, readiness
from tests.secure_kafka import PASSWORD, USER, SecureKafka
from tests.slot_rig import Done, SlotRig, refusal
from tests.waiting import eventually

pytestmark = pytest.mark.kafka_only

Settings = dict[str, str]
KEY_PASSWORD = "key-pa55word"


@pytest.fixture(scope="module")
def kafka(broker: Broker) -> SecureKafka:
    broker.secure.let_in(USER)
    return broker.secure


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    """Whom the broker does not trust, and who never signed its certificate."""
    return Authority(tmp_path / "stranger", "stranger")


def options(port: int, settings: Settings, host: str = "127.0.0.1") -> list[str]:
    """Later ones win."""
    return ["-b", f"{host}:{port}", *(word for name, value in settings.items() for word in ("-X", f"{name}={value}"))]


def tls(authority: Authority, **more: str) -> Settings:
    return {"security.protocol": "SSL", "ssl.ca.location": str(authority.certificate), **more}


def sasl(mechanism: str, authority: Authority | None = None, user: str = USER, password: str = PASSWORD) -> Settings:
    protocol = {"security.protocol": "SASL_PLAINTEXT"} if authority is None else tls(authority)
    if authority is not None:
        protocol["security.protocol"] = "SASL_SSL"
    return {**protocol, "sasl.mechanism": mechanism, "sasl.username": user, "sasl.password": password}


def with_certificate(kafka: SecureKafka) -> Settings:
    own = kafka.authority.issue("client", password=KEY_PASSWORD)
    return tls(
        kafka.authority,
        **{
            "ssl.certificate.location": str(own.certificate),
            "ssl.key.location": str(own.key),
            "ssl.key.password": KEY_PASSWORD,
        },
    )


RIGHT: dict[str, tuple[str, Callable[[SecureKafka], Settings]]] = {
    "TLS": ("TLS", lambda kafka: tls(kafka.authority)),
    "a certificate of the client's, with a locked key": ("CLIENTS", with_certificate),
    "PLAIN over TLS": ("SASL_TLS", lambda kafka: sasl("PLAIN", kafka.authority)),
    "SCRAM-SHA-256 over TLS": ("SASL_TLS", lambda kafka: sasl("SCRAM-SHA-256", kafka.authority)),
    "SCRAM-SHA-512 over TLS": ("SASL_TLS", lambda kafka: sasl("SCRAM-SHA-512", kafka.authority)),
    "SCRAM-SHA-256": ("SASL", lambda kafka: sasl("SCRAM-SHA-256")),
}


@pytest.mark.parametrize("way", RIGHT)
def test_with_the_right_settings_a_row_is_relayed(ready: SlotRig, kafka: SecureKafka, way: str) -> None:
    listener, settings = RIGHT[way]
    given = options(kafka.ports[listener], settings(kafka))
    rows = ready.stage()
    log = ready.catch_up(*given, "--log-level", "debug")
    ready.wait_for(rows)
    examined = ready.run("doctor", *given, "--topic", ready.topic)
    assert "ok    Kafka: 1 broker" in examined.stdout
    assert f"ok    topic: {ready.topic}" in examined.stdout
    for text in (log, *both(examined)):
        assert not shows_a_secret(text)


def test_status_asks_nothing_of_kafka_whatever_its_settings(ready: SlotRig, tmp_path: Path) -> None:
    """It shares the relay's configuration file."""
    path = tmp_path / "relay.toml"
    path.write_text(
        "bootstrap-servers = 'nowhere.invalid:1'\nproperty = ['security.protocol=SSL', 'ssl.ca.location=x']"
    )
    ready.catch_up()
    assert ready.run("status", "--config", path).returncode == 0


WRONG: dict[str, tuple[str, Callable[[SecureKafka, Authority], Settings], list[str]]] = {
    "the CA": ("TLS", lambda kafka, stranger: tls(stranger), ["certificate verify failed", "ssl.ca.location"]),
    "no CA": ("TLS", lambda kafka, stranger: {"security.protocol": "SSL"}, ["certificate verify failed"]),
    "the password for PLAIN": (
        "SASL_TLS",
        lambda kafka, stranger: sasl("PLAIN", kafka.authority, password=f"no {PASSWORD}"),
        ["Invalid username or password", "sasl.password"],
    ),
    "the password for SCRAM": (
        "SASL",
        lambda kafka, stranger: sasl("SCRAM-SHA-256", password=f"no {PASSWORD}"),
        ["invalid credentials", "SCRAM-SHA-256", "sasl.password"],
    ),
    "the user": (
        "SASL_TLS",
        lambda kafka, stranger: sasl("SCRAM-SHA-512", kafka.authority, user="nobody"),
        ["invalid credentials", "sasl.username"],
    ),
    "the mechanism": (
        "SASL",
        lambda kafka, stranger: sasl("SCRAM-SHA-512"),
        ["Unsupported SASL mechanism", "supported mechanisms: SCRAM-SHA-256", "sasl.mechanism"],
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_one_line_at_the_first_contact(
    ready: SlotRig, kafka: SecureKafka, stranger: Authority, what: str
) -> None:
    """And the slot is not touched."""
    listener, settings, words = WRONG[what]
    given = options(kafka.ports[listener], settings(kafka, stranger))
    ready.stage()
    before = ready.state()
    done = ready.run("stream", *given)
    assert "Kafka refuses this client" in refusal(done, 3, *words)
    assert [line for line in done.stderr.splitlines() if "metrics on port" not in line] == done.stderr.splitlines()[-1:]
    assert not any(map(shows_a_secret, both(done)))
    assert ready.state() == before
    if what not in ("the CA", "the password for SCRAM"):
        return
    examined = ready.run("doctor", *given, "--topic", ready.topic)
    assert examined.returncode == 3
    (line,) = [line for line in examined.stdout.splitlines() if line.startswith("fail ")]
    assert words[0] in line
    assert examined.stderr == ""
    assert not any(map(shows_a_secret, both(examined)))


def test_a_broker_called_by_another_name_than_its_certificate_has_is_refused(
    ready: SlotRig, kafka: SecureKafka
) -> None:
    """The certificate is for 127.0.0.1, and librdkafka compares by default."""
    wrong = options(kafka.ports["TLS"], tls(kafka.authority), host="localhost")
    refusal(ready.run("stream", *wrong), 3, "Kafka refuses this client", "certificate")


def test_a_refusal_is_noticed_where_the_topic_depends_on_the_row_and_by_verify(
    ready: SlotRig, kafka: SecureKafka
) -> None:
    wrong = options(kafka.ports["SASL"], sasl("SCRAM-SHA-256", password="wrong"))
    refusal(ready.run("stream", *wrong, "--topic", "jobs.{task}"), 3, "Kafka refuses this client", "sasl.password")
    refusal(ready.run("verify", *wrong), 3, "Kafka: ", "invalid credentials")


def test_a_wrong_protocol_says_what_it_may_be(ready: SlotRig, kafka: SecureKafka) -> None:
    """Nobody can tell it from a broker that is away, so it is waited for; the reason is in the log, once."""
    ready.stage()
    relay = ready.stream(*options(kafka.ports["TLS"], {}), "--shutdown-timeout", "1s")
    told = [line for line in relay.stderr_text().splitlines() if "Kafka" in line]
    assert "security.protocol" in told[0]
    assert len(told) < 4
    assert relay.terminate() == 0


# -- let in no longer -----------------------------------------------------------------------------------------------


@pytest.fixture
def guest(kafka: SecureKafka) -> Iterator[str]:
    """A user of the test's own."""
    name = f"guest-{secrets.token_hex(4)}"
    kafka.let_in(name)
    yield name
    kafka.let_in(name)  # there is something to delete, whatever the test did
    kafka.shut_out(name)


def test_a_relay_that_has_streamed_waits_until_it_is_let_in_again(
    ready: SlotRig, kafka: SecureKafka, guest: str
) -> None:
    settings = sasl("SCRAM-SHA-256", user=guest)
    relay = ready.stream(*options(kafka.ports["SASL"], settings), "--stalled-after", "2s", "--log-level", "debug")
    rows = ready.stage(count=3)
    ready.wait_for(rows)
    kafka.shut_out(guest)
    relay.wait_for_log("Authentication failed", 30)
    confirmed = ready.confirmed
    rows += ready.stage(count=3)
    eventually(lambda: readiness(relay)[0] == 503, 30, "the relay is not ready")
    assert ready.confirmed == confirmed
    pages = [get(f"{metrics_url(relay)}/{page}")[1] for page in ("", "status.json", "metrics", "readyz")]
    kafka.let_in(guest)
    ready.wait_for(rows)
    eventually(lambda: readiness(relay)[0] == 200, 30, "the relay is ready")
    assert relay.running
    assert relay.terminate() == 0
    told = [line for line in relay.stderr_text().splitlines() if "Authentication failed" in line]
    assert len(told) < 8
    assert not any(map(shows_a_secret, (relay.stderr_text(), *pages)))


def both(done: Done) -> tuple[str, str]:
    return done.stdout, done.stderr


def shows_a_secret(text: str) -> bool:
    return any(secret in text for secret in (PASSWORD, PASSWORD[:12], KEY_PASSWORD))
