"""librdkafka's properties that a producer may want, for whoever mistypes one. It knows best itself which exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_NAMES = """
acks allow.auto.create.topics api.version.request api.version.request.timeout.ms batch.num.messages batch.size
broker.address.family broker.address.ttl client.dns.lookup client.id client.rack compression.codec compression.level
compression.type connections.max.idle.ms debug delivery.timeout.ms enable.gapless.guarantee enable.idempotence
enable.metrics.push enable.sasl.oauthbearer.unsecure.jwt enable.ssl.certificate.verification
linger.ms log.connection.close log_level max.in.flight max.in.flight.requests.per.connection
message.copy.max.bytes message.max.bytes message.send.max.retries message.timeout.ms metadata.broker.list
metadata.max.age.ms partitioner queue.buffering.backpressure.threshold
queue.buffering.max.kbytes queue.buffering.max.messages queue.buffering.max.ms receive.message.max.bytes
reconnect.backoff.max.ms reconnect.backoff.ms request.required.acks request.timeout.ms retries retry.backoff.max.ms
retry.backoff.ms sasl.kerberos.keytab sasl.kerberos.kinit.cmd sasl.kerberos.min.time.before.relogin
sasl.kerberos.principal sasl.kerberos.service.name sasl.mechanism sasl.mechanisms sasl.oauthbearer.client.id
sasl.oauthbearer.client.secret sasl.oauthbearer.config sasl.oauthbearer.extensions sasl.oauthbearer.method
sasl.oauthbearer.scope sasl.oauthbearer.token.endpoint.url sasl.password sasl.username security.protocol
socket.connection.setup.timeout.ms socket.keepalive.enable socket.max.fails socket.nagle.disable
socket.receive.buffer.bytes socket.send.buffer.bytes socket.timeout.ms ssl.ca.certificate.stores ssl.ca.location
ssl.ca.pem ssl.certificate.location ssl.certificate.pem ssl.cipher.suites ssl.crl.location ssl.curves.list
ssl.endpoint.identification.algorithm ssl.engine.id ssl.key.location ssl.key.password ssl.key.pem
ssl.keystore.location ssl.keystore.password ssl.providers ssl.sigalgs.list statistics.interval.ms
sticky.partitioning.linger.ms topic.metadata.propagation.max.ms topic.metadata.refresh.fast.interval.ms
topic.metadata.refresh.interval.ms topic.metadata.refresh.sparse transactional.id
"""
PROPERTIES = frozenset(_NAMES.split())


def meant(given: Iterable[str]) -> str:
    """A hint for names that are not among these, or nothing."""
    unknown = [name for name in given if name not in PROPERTIES]
    close = [word for name in unknown for word in difflib.get_close_matches(name, PROPERTIES, n=1)]
    return f"did you mean {', '.join(close)}?" if close else ""
