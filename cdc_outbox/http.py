"""`/metrics`, `/healthz` and `/readyz`; loopback unless told otherwise, and nothing but these pages."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from cdc_outbox.errors import ConfigError
from cdc_outbox.metrics import Figures, ReadSlot, registry


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
        pages = _pages(figures, registry(figures, read_slot), stalled_seconds)
        server_class = type("Server", (ThreadingHTTPServer,), {"address_family": family})
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


def _pages(figures: Figures, own: CollectorRegistry, stalled_seconds: float) -> type[BaseHTTPRequestHandler]:
    class Pages(BaseHTTPRequestHandler):
        timeout = 10
        server_version = "cdc-outbox"
        sys_version = ""

        def do_GET(self) -> None:
            match self.path.partition("?")[0]:
                case "/metrics":
                    encoder, content_type = choose_encoder(self.headers.get("Accept", ""))
                    self._answer(200, encoder(own), content_type)
                case "/healthz":
                    self._answer(200, b"alive\n")
                case "/readyz":
                    reason = figures.not_ready(stalled_seconds)
                    self._answer(503 if reason else 200, f"{reason or 'ready'}\n".encode())
                case _:
                    self._answer(404, b"pages: /metrics /healthz /readyz\n")

        def _answer(self, code: int, body: bytes, content_type: str = "text/plain") -> None:
            self.send_response(code)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass  # a scrape is nothing an operator acts on

    return Pages
