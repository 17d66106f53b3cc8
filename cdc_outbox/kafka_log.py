"""What librdkafka says, at a rate that people can read: a dead broker makes 700 lines a minute (measured)."""

from __future__ import annotations

import logging
import time

log = logging.getLogger("cdc_outbox.kafka")

FAILED = "FAIL"
"""A connection that failed: librdkafka logs it, and calls `error_cb` with the same words, mostly."""


class QuietLog(logging.Filter):
    """Each kind of line is let through at once, then at intervals that double up to a minute; a connection's failure
    once, whichever way it comes."""

    LONGEST_SECONDS = 60.0

    def __init__(self) -> None:
        super().__init__()
        self.logger = logging.Logger("librdkafka")
        self.logger.parent = log
        self.logger.addFilter(self)
        self.muted = False
        """Somebody is asking, and will say himself what came of it."""
        self.last_failure = ""
        self._next: dict[str, tuple[float, float]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        line = record.getMessage()
        if "gapless" in line or "gap-less" in line:
            return False  # a remark at each start, and what the relay itself says of a refused batch
        kind = line.split(" ", 1)[0]
        if kind == FAILED:
            self.last_failure = line.partition("]: ")[2] or line
            record.msg, record.args, record.levelno, record.levelname = (
                f"Kafka: {self.last_failure}",
                (),
                logging.WARNING,
                "WARNING",
            )
        return not self.muted and self._due(kind)

    def say(self, reason: str, kind: str = FAILED) -> None:
        if not self.muted and self._due(kind):
            log.warning("Kafka: %s", reason)

    def _due(self, kind: str) -> bool:
        now = time.monotonic()
        due, interval = self._next.get(kind, (0.0, 1.0))
        if now < due:
            return False
        self._next[kind] = (now + interval, min(2 * interval, self.LONGEST_SECONDS))
        return True
