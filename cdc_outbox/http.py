"""`/metrics`, `/healthz`, `/readyz`, and for people `/`, which reads `/status.json`; loopback unless told otherwise."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6

from cdc_outbox.errors import ConfigError
from cdc_outbox.history import History
from cdc_outbox.metrics import Figures, ReadSlot
from cdc_outbox.status_page import HEADERS, PAGE, status_json


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
        # The server wakes twice a second anyway, and then calls `service_actions`.
        members = {"address_family": family, "service_actions": lambda _: history.sample()}
        server_class = type("Server", (ThreadingHTTPServer,), members)
        try:
            self._server: ThreadingHTTPServer = server_class((host, int(port)), pages)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"--metrics-address {address}: {reason}", "choose another, or `off`") from None
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


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
