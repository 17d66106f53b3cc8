"""Looks at Postgres all the time: how far the slot stands, and what other sessions can see."""

import contextlib
import threading
import time
from typing import Any

import psycopg

from cdc_outbox.lsn import parse_lsn
from tests.chaos.check import Sighting
from tests.chaos.writers import AWAY

EVERY_SECONDS = 0.05
LOOK = """
select confirmed_flush_lsn::text, pg_current_snapshot()::text from pg_replication_slots where slot_name = %s"""


class Witness:
    """One thread and its connection, which comes back when Postgres does."""

    def __init__(self, dsn: str, slot: str) -> None:
        self.sightings: list[Sighting] = []
        self._dsn, self._slot = dsn, slot
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="witness", daemon=True)
        self._failure: BaseException | None = None
        self._thread.start()

    def close(self) -> None:
        """Raises what it failed of: without it nothing would be proved."""
        self._stop.set()
        self._thread.join(30)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                with contextlib.suppress(*AWAY), psycopg.connect(self._dsn, connect_timeout=5) as connection:
                    connection.autocommit = True
                    while not self._stop.wait(EVERY_SECONDS):
                        self._look(connection)
                self._stop.wait(EVERY_SECONDS)
        except BaseException as failure:
            self._failure = failure

    def _look(self, connection: psycopg.Connection[Any]) -> None:
        before = time.time()
        row = connection.execute(LOOK, (self._slot,)).fetchone()
        after = time.time()
        assert row is not None, f"slot {self._slot} is gone"
        self.sightings.append(Sighting(before * 1000, after * 1000, parse_lsn(row[0]), row[1]))
