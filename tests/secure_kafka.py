"""Apache Kafka behind TLS and SASL: listeners beside the plain ones, so that a test sets up over those."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # not in its __all__
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)

from cdc_outbox.embedded import free_port
from tests.certificates import Authority
from tests.kafka_server import KafkaServer, silent
from tests.waiting import eventually

USER = "relay"
PASSWORD = "pa55word-Marker %40'=,{x}"
"""With what URIs, configuration files, JAAS and SCRAM each have a meaning for."""

_JAAS = "org.apache.kafka.common.security"
_LOGIN = {
    "PLAIN": f'{_JAAS}.plain.PlainLoginModule required user_{USER}="{PASSWORD}";',
    "SCRAM-SHA-256": f"{_JAAS}.scram.ScramLoginModule required;",
    "SCRAM-SHA-512": f"{_JAAS}.scram.ScramLoginModule required;",
}
_SCRAM = (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512)
LISTENERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "TLS": ("SSL", ()),
    "CLIENTS": ("SSL", ()),  # and asks for the client's certificate
    "SASL": ("SASL_PLAINTEXT", ("SCRAM-SHA-256",)),
    "SASL_TLS": ("SASL_SSL", ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")),
}
"""Name: (security.protocol, mechanisms)."""
REAUTHENTICATED_MS = 2000
"""On SASL a client must authenticate again this often, so that it notices when it no longer can."""


class SecureKafka(KafkaServer):
    """`ports` has one for each of LISTENERS. PLAIN knows USER; SCRAM knows whom a test has let in."""

    def __init__(self, authority: Authority, *, directory: Path | None = None) -> None:
        self.authority = authority
        self.ports = {name: free_port() for name in LISTENERS}
        super().__init__(directory=directory)

    def let_in(self, user: str) -> None:
        """With PASSWORD, by SCRAM."""
        for mechanism in _SCRAM:
            credential = UserScramCredentialUpsertion(user, ScramCredentialInfo(mechanism, 4096), PASSWORD.encode())
            self._alter(user, credential)

    def shut_out(self, user: str) -> None:
        for mechanism in _SCRAM:
            self._alter(user, UserScramCredentialDeletion(user, mechanism))

    def _alter(self, user: str, change: UserScramCredentialUpsertion | UserScramCredentialDeletion) -> None:
        admin = AdminClient({"bootstrap.servers": self.bootstrap}, logger=silent)  # its answers end with it

        def altered() -> bool:
            with contextlib.suppress(KafkaException):
                admin.alter_user_scram_credentials([change])[user].result(15)
                return True
            return False

        eventually(altered, 60, f"Kafka has changed the credentials of {user}")

    def _listeners(self) -> dict[str, object]:
        found = super()._listeners()
        at = ",".join(f"{name}://127.0.0.1:{port}" for name, port in self.ports.items())
        for setting in ("listeners", "advertised.listeners"):
            found[setting] = f"{found[setting]},{at}"
        protocols = ",".join(f"{name}:{protocol}" for name, (protocol, _) in LISTENERS.items())
        found["listener.security.protocol.map"] = f"{found['listener.security.protocol.map']},{protocols}"
        found["listener.name.sasl.connections.max.reauth.ms"] = REAUTHENTICATED_MS
        own = self.authority.issue("broker")
        for name, (protocol, mechanisms) in LISTENERS.items():
            prefix = f"listener.name.{name.lower()}"
            if "SSL" in protocol:
                found |= {
                    f"{prefix}.ssl.keystore.type": "PEM",
                    f"{prefix}.ssl.keystore.location": own.chain,
                    f"{prefix}.ssl.truststore.type": "PEM",
                    f"{prefix}.ssl.truststore.location": self.authority.certificate,
                    f"{prefix}.ssl.client.auth": "required" if name == "CLIENTS" else "none",
                }
            found[f"{prefix}.num.network.threads"] = 1
            if mechanisms:
                found[f"{prefix}.sasl.enabled.mechanisms"] = ",".join(mechanisms)
            for mechanism in mechanisms:
                found[f"{prefix}.{mechanism.lower()}.sasl.jaas.config"] = _LOGIN[mechanism]
        return found
