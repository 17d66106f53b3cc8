"""Log lines for people or for machines, on stderr. Positions, counts and names; never keys, values or a DSN."""

from __future__ import annotations

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from urllib.parse import quote

SHORTEST_SECRET = 4
"""What is shorter stands in half of all words."""
_secrets: set[str] = set()


def hide(*secrets: str | None) -> None:
    """From now on none of these is shown, however it came into a message: an exception nobody expected can quote
    anything. Nothing else relies on it."""
    for secret in secrets:
        if secret and len(secret) >= SHORTEST_SECRET:
            _secrets.update((secret, quote(secret, safe="")))


def redacted(text: str) -> str:
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = f"{moment.replace('+00:00', 'Z')} {record.levelname.lower()}: {record.getMessage()}"
        return redacted(f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line)


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redacted(record.getMessage()),
        }
        if record.exc_info:
            line["traceback"] = redacted(self.formatException(record.exc_info))
        return json.dumps(line)


def set_up(log_format: str, level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    package = logging.getLogger("cdc_outbox")
    package.handlers[:] = [handler]
    package.setLevel(level.upper())
    package.propagate = False
    threading.excepthook = _thread_ended


def _thread_ended(ended: threading.ExceptHookArgs) -> None:
    """As `cli.main` says it of the main thread; Python's own words would go past `redacted`."""
    package = logging.getLogger("cdc_outbox")
    name = ended.thread.name if ended.thread is not None else "?"
    package.error("thread %s ended: unexpected %s: %s", name, ended.exc_type.__name__, ended.exc_value)
    if ended.exc_value is not None:
        package.debug("traceback", exc_info=ended.exc_value)
