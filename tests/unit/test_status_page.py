"""`/status.json` and the page that reads it, asked over a real socket."""

import json
import math
import re
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from cdc_outbox.errors import ConnectionLost, PreconditionError
from cdc_outbox.history import History, quantile
from cdc_outbox.http import MetricsServer
from cdc_outbox.metrics import LATENCY_BUCKETS, Figures
from cdc_outbox.slot_watch import Reading
from cdc_outbox.status_page import HEADERS, PAGE, status
from tests.fix_command import get

TEXT = PAGE.decode()
GAP = "run `cdc-outbox init-slot`: it makes a new slot and sends what is still in the table"


@pytest.fixture
def figures() -> Figures:
    return Figures("my_slot")


@pytest.fixture
def url(figures: Figures) -> Iterator[str]:
    server = MetricsServer("127.0.0.1:0", figures)
    yield f"http://127.0.0.1:{server.port}"
    server.close()


def reading(wal_status: str = "reserved", safe_bytes: float = math.inf) -> Reading:
    return Reading(
        at=time.time(),
        wal_status=wal_status,
        active=True,
        retained_bytes=800,
        safe_bytes=safe_bytes,
        confirmed_flush_lsn=100,
        wal_position=900,
        waiting_since=None,
    )


def told(figures: Figures, read: Reading | None = None) -> dict[str, Any]:
    return status(figures, History(figures), read, 30.0)


def test_the_page_is_one_file_that_loads_nothing_and_may_run_only_its_own_script(url: str) -> None:
    with urllib.request.urlopen(f"{url}/", timeout=5) as answer:
        assert answer.read() == PAGE
        policy = answer.headers["Content-Security-Policy"]
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert policy == HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?([^\"')\s>]+)", TEXT) == ["metrics", "readyz", "status.json"]
    assert set(re.findall(r"https?://\S+?(?=\")", TEXT)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"innerHTML|insertAdjacent|document\.write|eval\(| style=| on\w+=", TEXT)


def test_every_figure_that_the_page_shows_is_served(url: str) -> None:
    code, body = get(f"{url}/status.json")
    assert code == 200
    served = json.loads(body)
    asked = set(re.findall(r"\bfound\.(\w+)", TEXT)) - {"dataset"}
    slot = told(Figures("slot"), reading())["slot"]
    assert asked <= served.keys() | slot.keys()
    assert set(re.findall(r'"(\w+)", "(?:p\d\d )?"\]', TEXT)) <= served["history"].keys()


def test_a_fresh_relay_is_starting_and_knows_of_nothing(figures: Figures) -> None:
    found = told(figures)
    assert (found["state"], found["why"]) == ("starting", "")
    assert [found[name] for name in ("slot", "last_error", "last_purge", "last_confirm")] == [None] * 4
    assert found["history"]["rows_per_second"] == []


def test_a_slot_without_a_limit_is_valid_json(figures: Figures) -> None:
    found = json.loads(json.dumps(told(figures, reading()), allow_nan=False))
    assert found["slot"]["safe_bytes"] is None
    assert told(figures, reading(safe_bytes=5.0))["slot"]["safe_bytes"] == 5.0


def test_a_stalled_relay_says_for_which_side_it_waits(figures: Figures) -> None:
    figures.enter("streaming")
    figures.pending_since = time.time() - 90
    figures.last_progress = time.monotonic() - 60
    figures.in_flight_rows = 1
    found = told(figures)
    assert found["state"] == "stalled"
    assert found["why"] == "nothing acknowledged or confirmed for 60 s while work is pending"
    assert found["remedy"].startswith("Kafka has not acknowledged 1 row: ")
    figures.in_flight_rows = 0
    assert "Postgres holds it up" in told(figures)["remedy"]


def test_a_relay_at_work_has_nothing_to_mend(figures: Figures) -> None:
    figures.enter("streaming")
    found = told(figures, reading())
    assert (found["state"], found["why"], found["remedy"]) == ("streaming", "", "")


@pytest.mark.parametrize("wal_status", ["lost", "missing"])
def test_a_slot_that_is_gone_comes_before_all_else(figures: Figures, wal_status: str) -> None:
    figures.enter("failed", "whatever came of it")
    assert told(figures, reading(wal_status))["remedy"] == GAP


def test_the_last_error_stays_with_its_remedy(figures: Figures) -> None:
    figures.note(PreconditionError("no such topic", "create it"))
    figures.enter("failed", "no such topic")
    assert told(figures)["remedy"] == "create it"
    figures.enter("streaming")
    assert told(figures)["last_error"]["message"] == "no such topic"
    assert told(figures)["last_error"]["hint"] == "create it"
    figures.note(ConnectionLost("gone"))
    figures.enter("failed", "gone")
    assert told(figures)["remedy"].startswith("it starts over from the slot by itself")


def test_a_purge_is_told_with_its_rows(figures: Figures) -> None:
    figures.purged(7)
    figures.purged(2)
    found = told(figures)
    assert (found["last_purge"]["rows"], found["purged_rows"]) == (2, 9)
    assert abs(found["last_purge"]["at"] - time.time()) < 60


def test_the_history_has_a_value_a_step_and_none_where_nothing_was_acknowledged(figures: Figures) -> None:
    past = History(figures, step_seconds=0.0)
    past.sample()
    figures.relayed_rows = 10
    figures.commit_to_ack.observe(0.004)
    past.sample()
    past.sample()
    found = past.series()
    assert [len(values) for values in found.values()] == [2] * 5
    assert (found["rows_per_second"][0] or 0) > 0
    assert found["rows_per_second"][1] == 0
    assert 0.0025 <= (found["latency_p50"][0] or 0) <= 0.005
    assert found["latency_p50"][1] is None
    assert found["age"] == sorted(found["age"], reverse=True, key=lambda age: age or 0)


def test_the_history_keeps_fifteen_minutes_and_takes_one_sample_a_step(figures: Figures) -> None:
    past = History(figures)
    for _ in range(3):
        past.sample()
    assert past.series()["age"] == []
    assert past._samples.maxlen == 900 / 5 + 1


def test_a_quantile_lies_within_its_bucket_and_the_last_bound_is_the_most_it_says() -> None:
    counts = [0] * (len(LATENCY_BUCKETS) + 1)
    assert quantile(counts, 0.5) is None
    counts[0], counts[1] = 2, 2
    assert quantile(counts, 0.5) == LATENCY_BUCKETS[0]
    assert quantile(counts, 0.75) == pytest.approx((LATENCY_BUCKETS[0] + LATENCY_BUCKETS[1]) / 2)
    counts[-1] = 100
    assert quantile(counts, 0.99) == LATENCY_BUCKETS[-1]
