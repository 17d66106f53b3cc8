"""The page at `/` and the `/status.json` that it reads: what the relay knows of itself, from memory.

Figures, names and errors only; no key and no value of a row. The page is one file that loads nothing else, and its
Content-Security-Policy lets it run its own script, by hash, and ask its own server.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import time
from importlib import resources
from typing import Any

from cdc_outbox import __version__
from cdc_outbox.history import SPAN_SECONDS, History
from cdc_outbox.metrics import Figures
from cdc_outbox.slot_watch import MISSING, Reading

PAGE = resources.files("cdc_outbox").joinpath("page.html").read_bytes()

_GAP = "run `cdc-outbox init-slot`: it makes a new slot and sends what is still in the table"
_REMEDIES = {
    "starting": "nothing yet: it connects to Postgres and Kafka",
    "standby": "nothing: it takes over when the relay that holds the slot ends",
    "draining": "nothing: it finishes what is in flight, and ends",
    "failed": "it starts over from the slot by itself, and skips nothing; if it does not, run `cdc-outbox doctor`",
}


def _sources(tag: str) -> str:
    """The hashes of what stands in each `tag` of the page."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), PAGE, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in found)


HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_sources('script')}; style-src {_sources('style')}; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def status_json(figures: Figures, history: History, reading: Reading | None, stalled_seconds: float) -> bytes:
    return json.dumps(status(figures, history, reading, stalled_seconds), allow_nan=False).encode()


def status(figures: Figures, history: History, reading: Reading | None, stalled_seconds: float) -> dict[str, Any]:
    why = figures.not_ready(stalled_seconds)
    state = "stalled" if why is not None and figures.state == "streaming" else figures.state
    error, purge = figures.last_error, figures.last_purge
    return {
        "slot_name": figures.slot_name,
        "version": __version__,
        "now": time.time(),
        "state": state,
        "why": why.partition(": ")[2] if why else "",
        "remedy": remedy(figures, state, reading),
        "lag_seconds": figures.oldest_unacked_seconds(reading),
        "lag_bytes": figures.lag_bytes(reading),
        "in_flight_rows": figures.in_flight_rows,
        "relayed_rows": figures.relayed_rows,
        "dead_letters": figures.dead_letters,
        "purged_rows": figures.purged_rows,
        "last_confirm": figures.last_confirm or None,
        "last_purge": {"at": purge.at, "rows": purge.rows} if purge else None,
        "last_error": {"at": error.at, "message": error.message, "hint": error.hint} if error else None,
        "slot": slot(reading) if reading else None,
        "history": {"span_seconds": SPAN_SECONDS, **history.series()},
    }


def slot(reading: Reading) -> dict[str, Any]:
    """`safe_bytes` is None where the server sets no limit."""
    return {
        "read_at": reading.at,
        "wal_status": reading.wal_status,
        "active": reading.active,
        "retained_bytes": reading.retained_bytes,
        "safe_bytes": reading.safe_bytes if math.isfinite(reading.safe_bytes) else None,
    }


def remedy(figures: Figures, state: str, reading: Reading | None) -> str:
    """What the person who looks should do; empty if nothing is the matter."""
    if reading is not None and reading.wal_status in ("lost", MISSING):
        return _GAP
    if state == "stalled" and figures.in_flight_rows:
        rows = f"{figures.in_flight_rows} row{'s' * (figures.in_flight_rows != 1)}"
        return (
            f"Kafka has not acknowledged {rows}: look at its brokers, or run `cdc-outbox doctor`;"
            " the relay goes on by itself once they answer"
        )
    if state == "stalled":
        return (
            "nothing waits for Kafka, so Postgres holds it up: a synchronous standby that does not answer, or a lock;"
            " `cdc-outbox status` shows what"
        )
    if state == "failed" and figures.last_error is not None and figures.last_error.hint:
        return figures.last_error.hint
    return _REMEDIES.get(state, "")
