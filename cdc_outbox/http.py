"""`/metrics`, `/healthz`, `/readyz`, and for people `/`, which reads `/status.json`; loopback unless told otherwise."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6, SHUT_RDWR
from typing import Any

from cdc_outbox.errors import ConfigError
from cdc_outbox.history import History
from cdc_outbox.metrics import Figures, ReadSlot
from cdc_outbox.status_page import HEADERS, PAGE, status_json

log = logging.getLogger("cdc_outbox.http")


class MetricsServer:
    """Bound when made, before any slot is touched; serves from daemon threads until `close`."""

    def __init__(
        self,
        address: str,
        figures: Figures,
        read_slot: ReadSlot = lambda: None,
        stalled_seconds: float = 30.0,
    ) -> None:
        """`address` is HOST:PORT; port 0 takes a free one. Raises ConfigError if it cannot be bound."""
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        family = AF_INET6 if ":" in host else AF_INET
        history = History(figures)
        pages = _pages(figures, history, read_slot, stalled_seconds)
        try:
            self._server = _Server((host, int(port)), pages, family, history)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"--metrics-address {address}: {reason}", "choose another, or `off`") from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    """A thread a client, and neither many nor for long: whoever can connect must not be able to use up the relay."""

    daemon_threads = True
    request_queue_size = 64
    most_clients = 32
    longest_seconds = 30.0

    def __init__(
        self, address: tuple[str, int], pages: type[BaseHTTPRequestHandler], family: int, history: History
    ) -> None:
        self.address_family = family
        self._history = history
        self._clients: dict[object, float] = {}
        """Their sockets, the oldest first, and since when."""
        super().__init__(address, pages)

    def process_request(self, request: Any, client_address: Any) -> None:
        too_many = max(0, len(self._clients) + 1 - self.most_clients)
        for oldest in list(self._clients)[:too_many]:
            self._clients.pop(oldest, None)
            _hang_up(oldest)
        self._clients[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._clients.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second."""
        self._history.sample()
        for client, since in list(self._clients.items()):
            if time.monotonic() - since > self.longest_seconds:
                _hang_up(client)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a client of the metrics server went away: %s", type(sys.exception()).__name__)


def _hang_up(client: Any) -> None:
    with contextlib.suppress(OSError):
        client.shutdown(SHUT_RDWR)  # its thread sees the end, and closes


def _pages(
    figures: Figures, history: History, read_slot: ReadSlot, stalled_seconds: float
) -> type[BaseHTTPRequestHandler]:
    class Pages(BaseHTTPRequestHandler):
        timeout = 10
        server_version = "cdc-outbox"
        sys_version = ""

        def do_GET(self) -> None:
            match self.path.partition("?")[0]:
                case "/metrics":
                    from cdc_outbox.exposition import scrape

                    self._answer(200, *scrape(figures, read_slot, self.headers.get("Accept", "")))
                case "/healthz":
                    self._answer(200, b"alive\n")
                case "/readyz":
                    reason = figures.not_ready(stalled_seconds)
                    self._answer(503 if reason else 200, f"{reason or 'ready'}\n".encode())
                case "/":
                    self._answer(200, PAGE, "text/html; charset=utf-8", HEADERS)
                case "/status.json":
                    body = status_json(figures, history, read_slot(), stalled_seconds)
                    self._answer(200, body, "application/json", HEADERS)
                case _:
                    self._answer(404, b"pages: / /metrics /healthz /readyz /status.json\n")

        def _answer(
            self, code: int, body: bytes, content_type: str = "text/plain", headers: Mapping[str, str] | None = None
        ) -> None:
            self.send_response(code)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass  # a scrape is nothing an operator acts on

    return Pages
