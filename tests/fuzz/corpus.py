"""What fuzzing begins with: the golden bytes of every PostgreSQL major, and what people and programs really send."""

from tests.fuzz.targets import NAMES, join
from tests.unit.golden_stream import GOLDEN, samples, transactions

REQUESTS = [
    b"GET /metrics HTTP/1.1\r\nHost: relay:9187\r\nAccept: application/openmetrics-text;q=0.7,*/*\r\n\r\n",
    b"GET /healthz?verbose=1 HTTP/1.0\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\nGET /readyz HTTP/1.1\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\nabc",
    b"GET /status.json\r\n",
    b"GET http://relay/ HTTP/2.0\r\n\r\n",
]
TEXTS = ["0/16B3748", "FFFFFFFF/0", "500ms", "1.5 h", "jobs.{task}", "{{x}}", ':"a" :\'b\' ::"char"', "7:9:7,8", "7:7:"]


def _rows() -> list[bytes]:
    found: list[bytes] = []
    for messages in (streams["workload"] for streams in GOLDEN.values()):
        for transaction in transactions(messages):
            for _, row in transaction.rows:
                values = [row.get(name) for name in NAMES]
                pieces = [b"\0" if value is None else b"\1" + value.encode() for value in values]
                found.append(bytes([len(found) % 8]) + join(pieces))
    return [*found, b"\0" + join([b"\1" + value for value in (b"1", b"t", b"{}", b"k", b'{"": "x"}')])]


def _streams() -> list[bytes]:
    return [join(messages[:60]) for streams in GOLDEN.values() for messages in streams.values()]


SEEDS: dict[str, list[bytes]] = {
    "message": [sample.column_count.to_bytes(2, "big") + sample.message for sample in samples()],
    "stream": _streams(),
    "row": _rows(),
    "request": REQUESTS,
    "text": [text.encode() for text in TEXTS],
}
