"""Whoever can reach the metrics server gets its pages and nothing else, and cannot hold it up."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from cdc_outbox.cli import cli
from cdc_outbox.config import Settings
from cdc_outbox.http import MetricsServer
from cdc_outbox.metrics import Figures
from tests.fix_command import get
from tests.waiting import eventually

NO_PAGE = b"pages: / /metrics /healthz /readyz /status.json\n"


@pytest.fixture(scope="module")
def server() -> Iterator[MetricsServer]:
    made = MetricsServer("127.0.0.1:0", Figures("my_slot"))
    yield made
    made.close()


def connect(server: MetricsServer) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port))
    client.settimeout(20)
    return client


def answer(server: MetricsServer, request: bytes) -> tuple[int, bytes]:
    """Status and body; a request of no known version is answered with a body alone, and 0 here."""
    with connect(server) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(request)
        received = b""
        with contextlib.suppress(ConnectionError):
            while more := client.recv(65536):
                received += more
    if not received.startswith(b"HTTP/"):
        return 0, received
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def test_it_is_on_loopback_unless_told_otherwise() -> None:
    (option,) = [option for option in cli.commands["stream"].params if option.name == "metrics_address"]
    assert option.default == Settings().metrics_address == "127.0.0.1:9187"


@pytest.mark.parametrize(
    "path",
    [
        "/../../../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/metrics/../../../etc/passwd",
        "/metrics/",
        "/metrics%00",
        "/page.html",
        "/cdc_outbox/page.html",
        "file:///etc/passwd",
        "http://127.0.0.1/metrics",
        "*",
        "metrics",
        "/" + "a" * 60_000,
    ],
)
def test_any_other_path_is_no_page(server: MetricsServer, path: str) -> None:
    assert answer(server, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()) == (404, NO_PAGE)


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "get", "X"]
)
def test_any_other_method_is_not_implemented_and_echoes_nothing(server: MetricsServer, method: str) -> None:
    request = f"{method} /metrics HTTP/1.1\r\nHost: x\r\nCookie: marker\r\nContent-Length: 6\r\n\r\nmarker"
    status, body = answer(server, request.encode())
    assert status == 501
    assert b"marker" not in body
    assert b"cdc_outbox" not in body


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/9.9\r\n\r\n", 0),
        (b"GET / metrics HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 \r\n\r\n", 0),
        (b"GET /\xff<script>alert(1)</script> HTTP/1.1\r\n\r\n", 404),
    ],
)
def test_what_is_too_long_or_no_http_is_refused(server: MetricsServer, request_: bytes, expected: int) -> None:
    status, body = answer(server, request_)
    assert status == expected
    assert b"<script>" not in body


def test_a_client_that_goes_away_leaves_no_trace(server: MetricsServer, capfd: pytest.CaptureFixture[str]) -> None:
    threads = threading.active_count()
    for _ in range(20):
        with connect(server) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" * 50)
    assert get(f"http://127.0.0.1:{server.port}/healthz") == (200, "alive\n")
    eventually(lambda: threading.active_count() <= threads, 20, "their threads have ended")
    assert capfd.readouterr() == ("", "")


def test_clients_that_say_nothing_keep_nobody_out_and_are_few(server: MetricsServer) -> None:
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            client = stack.enter_context(connect(server))
            client.sendall(b"GET /metrics HT")
        assert get(f"http://127.0.0.1:{server.port}/healthz") == (200, "alive\n")
        most = server._server.most_clients + 1
        # Long before they would have been given up for saying nothing.
        eventually(lambda: threading.active_count() <= before + most, 5, "the oldest were hung up on")


def test_a_client_that_says_a_little_now_and_then_is_hung_up_on_in_the_end(
    monkeypatch: pytest.MonkeyPatch, server: MetricsServer
) -> None:
    monkeypatch.setattr(server._server, "longest_seconds", 0.2)
    with connect(server) as client:

        def ended() -> bool:
            with contextlib.suppress(BrokenPipeError):
                client.sendall(b"a")
                client.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    return client.recv(100) == b""
                return False
            return True

        eventually(ended, 20, "the server has hung up")
