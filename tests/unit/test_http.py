"""The pages that are watched, asked over a real socket."""

import math
import socket
import time
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cdc_outbox.errors import ConfigError
from cdc_outbox.exposition import METRIC_NAMES, WAL_STATUSES
from cdc_outbox.http import MetricsServer
from cdc_outbox.metrics import (
    FAILURE_KINDS,
    LATENCY_BUCKETS,
    SIDES,
    Figures,
    Histogram,
)
from cdc_outbox.slot_watch import Reading
from tests.fix_command import get, scrape

STALLED_SECONDS = 30.0  # by default


@pytest.fixture
def figures() -> Figures:
    return Figures("my_slot")


def reading(*, confirmed: int = 100, waiting_seconds: float | None = None, position: int = 900) -> Reading:
    return Reading(
        at=1.7e9,
        wal_status="extended",
        active=True,
        retained_bytes=800,
        safe_bytes=math.inf,
        confirmed_flush_lsn=confirmed,
        wal_position=position,
        waiting_since=None if waiting_seconds is None else time.monotonic() - waiting_seconds,
    )


@pytest.fixture
def server(figures: Figures) -> Iterator[MetricsServer]:
    made = MetricsServer("127.0.0.1:0", figures)
    yield made
    made.close()


@pytest.fixture
def url(server: MetricsServer) -> str:
    return f"http://127.0.0.1:{server.port}"


def test_every_series_exists_from_the_first_scrape_and_no_other(url: str) -> None:
    _, page = get(f"{url}/metrics")
    families = list(text_string_to_metric_families(page))
    suffix = {"counter": "_total"}
    assert sorted(family.name + suffix.get(family.type, "") for family in families) == sorted(METRIC_NAMES)
    assert all(family.samples for family in families)
    assert all(family.documentation for family in families)


def test_every_series_of_the_relay_carries_its_slot_and_labels_are_bounded(url: str) -> None:
    _, page = get(f"{url}/metrics")
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    for sample in samples:
        if sample.name == "cdc_outbox_build_info":
            assert set(sample.labels) == {"version", "python"}
        else:
            assert sample.labels["slot_name"] == "my_slot"
    kinds = [s.labels["kind"] for s in samples if s.name == "cdc_outbox_delivery_failures_total"]
    sides = [s.labels["side"] for s in samples if s.name == "cdc_outbox_reconnects_total"]
    assert (kinds, sides) == (list(FAILURE_KINDS), list(SIDES))


def test_a_fresh_relay_counts_nothing_and_has_no_lag_and_knows_nothing_of_the_slot(url: str) -> None:
    values = scrape(f"{url}/metrics")
    names = {name.partition("{")[0]: value for name, value in values.items() if value}
    unknown = {name for name, value in names.items() if math.isnan(value)}
    assert unknown == {
        f"cdc_outbox_slot_{name}" for name in ("retained_wal_bytes", "safe_wal_bytes", "active", "wal_status")
    }
    assert names.keys() - unknown == {"cdc_outbox_build_info"}


def test_what_postgres_says_of_the_slot_is_what_is_scraped(figures: Figures) -> None:
    server = MetricsServer("127.0.0.1:0", figures, reading)
    try:
        values = scrape(f"http://127.0.0.1:{server.port}/metrics")
    finally:
        server.close()
    slot = '{slot_name="my_slot"}'
    assert values[f"cdc_outbox_slot_retained_wal_bytes{slot}"] == 800
    assert values[f"cdc_outbox_slot_safe_wal_bytes{slot}"] == math.inf
    assert values[f"cdc_outbox_slot_active{slot}"] == 1
    assert values[f"cdc_outbox_slot_read_timestamp_seconds{slot}"] == 1.7e9
    statuses = {s: values[f'cdc_outbox_slot_wal_status{{slot_name="my_slot",status="{s}"}}'] for s in WAL_STATUSES}
    assert statuses == {"reserved": 0, "extended": 1, "unreserved": 0, "lost": 0, "missing": 0}


def test_what_the_relay_counts_is_what_is_scraped(url: str, figures: Figures) -> None:
    figures.relayed_rows, figures.relayed_transactions, figures.relayed_bytes = 5, 2, 900
    figures.dead_letters, figures.purged_rows, figures.in_flight_rows = 1, 4, 3
    figures.visibility_wait_seconds, figures.last_confirm, figures.streaming = 0.25, 1.7e9, True
    figures.delivery_failures["refused"] = 6
    figures.reconnects["kafka"] = 7
    values = scrape(f"{url}/metrics")
    slot = '{slot_name="my_slot"}'
    assert values[f"cdc_outbox_relayed_rows_total{slot}"] == 5
    assert values[f"cdc_outbox_relayed_transactions_total{slot}"] == 2
    assert values[f"cdc_outbox_relayed_bytes_total{slot}"] == 900
    assert values[f"cdc_outbox_dead_letters_total{slot}"] == 1
    assert values[f"cdc_outbox_purged_rows_total{slot}"] == 4
    assert values[f"cdc_outbox_in_flight_rows{slot}"] == 3
    assert values[f"cdc_outbox_visibility_wait_seconds_total{slot}"] == 0.25
    assert values[f"cdc_outbox_last_confirm_timestamp_seconds{slot}"] == 1.7e9
    assert values[f"cdc_outbox_streaming{slot}"] == 1
    assert values['cdc_outbox_delivery_failures_total{kind="refused",slot_name="my_slot"}'] == 6
    assert values['cdc_outbox_reconnects_total{side="kafka",slot_name="my_slot"}'] == 7


def test_lag_grows_in_wall_time_while_something_is_pending_and_is_never_negative(figures: Figures) -> None:
    figures.received_lsn, figures.confirmed_lsn = 500, 100
    assert (figures.lag_bytes(), figures.oldest_unacked_seconds()) == (0, 0.0)
    figures.pending_since = time.time() - 60
    assert figures.lag_bytes() == 400
    first = figures.oldest_unacked_seconds()
    assert 60 <= first < 120
    assert figures.oldest_unacked_seconds() > first
    figures.pending_since = time.time() + 60  # the server's clock is ahead of ours
    figures.received_lsn = 50
    assert (figures.lag_bytes(), figures.oldest_unacked_seconds()) == (0, 0.0)


def test_a_row_that_only_postgres_knows_of_is_lag_until_something_is_confirmed_after_it(figures: Figures) -> None:
    figures.confirmed_lsn = figures.received_lsn = 100
    found = reading(confirmed=100, waiting_seconds=60)
    assert figures.lag_bytes(found) == 800
    first = figures.oldest_unacked_seconds(found)
    assert 60 <= first < 120
    assert figures.oldest_unacked_seconds(found) > first
    figures.confirmed_lsn = 101
    assert (figures.lag_bytes(found), figures.oldest_unacked_seconds(found)) == (0, 0.0)
    assert figures.lag_bytes(reading(waiting_seconds=None)) == 0
    figures.confirmed_lsn = 100
    assert figures.lag_bytes(reading(waiting_seconds=1, position=50)) == 0


def test_lag_counts_the_wal_that_a_full_queue_keeps_the_relay_from_reading(figures: Figures) -> None:
    figures.received_lsn, figures.confirmed_lsn = 500, 100
    figures.pending_since = time.time()
    assert figures.lag_bytes(reading(confirmed=90)) == 800
    assert figures.lag_bytes(reading(confirmed=90, position=300)) == 400


def test_what_was_pending_when_the_stream_died_is_pending_until_the_next_session_has_come_as_far(
    figures: Figures,
) -> None:
    committed = time.time() - 60
    figures.account(received_lsn=500, pending_since=committed)
    figures.enter("failed", "the server went away")
    figures.begin_session(end_of_wal=600)
    for received, pending_since in ((0, None), (400, None), (450, committed), (450, None)):
        figures.account(received, pending_since)
        assert figures.pending_since == committed
        assert figures.received_lsn == 500
    figures.account(500, None)
    assert figures.pending_since is None


def test_a_failover_to_a_server_with_less_wal_does_not_leave_something_pending_for_ever(figures: Figures) -> None:
    figures.account(received_lsn=500, pending_since=time.time())
    figures.begin_session(end_of_wal=300)
    figures.account(300, None)
    assert figures.pending_since is None


def test_what_a_standby_left_pending_is_the_business_of_the_relay_that_took_over(figures: Figures) -> None:
    figures.account(received_lsn=500, pending_since=time.time() - 60)
    figures.enter("standby", "slot my_slot is held by pid 7")
    assert figures.oldest_unacked_seconds() == 0
    assert figures.not_ready(STALLED_SECONDS) == "standby: slot my_slot is held by pid 7"


def test_nothing_stands_still_before_there_is_work(figures: Figures) -> None:
    figures.enter("streaming")
    figures.last_progress = time.monotonic() - 3600
    figures.account(500, time.time())
    assert figures.not_ready(STALLED_SECONDS) is None
    figures.last_progress -= 3600
    figures.account(600, time.time())
    assert (figures.not_ready(STALLED_SECONDS) or "").startswith("stalled: ")


def test_the_histogram_is_cumulative_and_has_a_count_and_a_sum(url: str, figures: Figures) -> None:
    for seconds in (0.0005, 0.001, 0.003, 5000.0):
        figures.commit_to_ack.observe(seconds)
    values = scrape(f"{url}/metrics")
    name = "cdc_outbox_commit_to_ack_seconds"
    buckets = [value for key, value in values.items() if key.startswith(f"{name}_bucket")]
    assert buckets == sorted(buckets)
    assert len(buckets) == len(LATENCY_BUCKETS) + 1
    assert values[f'{name}_bucket{{le="0.001",slot_name="my_slot"}}'] == 2
    assert values[f'{name}_bucket{{le="+Inf",slot_name="my_slot"}}'] == 4
    assert values[f'{name}_count{{slot_name="my_slot"}}'] == 4
    assert values[f'{name}_sum{{slot_name="my_slot"}}'] == pytest.approx(5000.0045)


def test_a_histogram_counts_a_bound_into_its_own_bucket() -> None:
    histogram = Histogram()
    for bound in LATENCY_BUCKETS:
        histogram.observe(bound)
    assert histogram.counts == [1] * len(LATENCY_BUCKETS) + [0]


def test_healthz_tells_that_the_process_lives_whatever_the_relay_does(url: str, figures: Figures) -> None:
    figures.state = "failed"
    assert get(f"{url}/healthz") == (200, "alive\n")


@pytest.mark.parametrize("state", ["starting", "standby", "draining", "stopped", "failed"])
def test_readyz_names_the_state_of_a_relay_that_does_not_stream(url: str, figures: Figures, state: str) -> None:
    figures.state = state
    assert get(f"{url}/readyz") == (503, f"{state}\n")


def test_readyz_says_why_the_relay_failed(url: str, figures: Figures) -> None:
    figures.enter("failed", "no word from Postgres for 20 s")
    assert get(f"{url}/readyz") == (503, "failed: no word from Postgres for 20 s\n")
    figures.enter("streaming")
    assert get(f"{url}/readyz") == (200, "ready\n")


def test_readyz_is_content_with_an_idle_relay(url: str, figures: Figures) -> None:
    figures.state = "streaming"
    figures.last_progress = time.monotonic() - 10 * STALLED_SECONDS
    assert get(f"{url}/readyz") == (200, "ready\n")


def test_readyz_is_content_with_a_relay_that_is_behind_but_moves(url: str, figures: Figures) -> None:
    figures.state = "streaming"
    figures.pending_since = time.time() - 3600
    assert get(f"{url}/readyz") == (200, "ready\n")


def test_readyz_fails_when_work_is_pending_and_nothing_moves(url: str, figures: Figures) -> None:
    figures.state = "streaming"
    figures.pending_since = time.time()
    figures.last_progress = time.monotonic() - STALLED_SECONDS - 5
    status, body = get(f"{url}/readyz")
    assert status == 503
    assert body.startswith("stalled: nothing acknowledged or confirmed for 3")


@pytest.mark.parametrize("path", ["/index.html", "/metrics/", "/metric", "/../etc/passwd"])
def test_any_other_page_is_not_found_and_names_those_that_are(url: str, path: str) -> None:
    assert get(url + path) == (404, "pages: / /metrics /healthz /readyz /status.json\n")


def test_a_query_string_is_ignored(url: str) -> None:
    assert get(f"{url}/healthz?verbose=1") == (200, "alive\n")


def test_a_port_in_use_is_a_configuration_error_that_names_the_option(server: MetricsServer, figures: Figures) -> None:
    with pytest.raises(ConfigError) as caught:
        MetricsServer(f"127.0.0.1:{server.port}", figures)
    assert str(caught.value) == f"--metrics-address 127.0.0.1:{server.port}: Address already in use"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("address", ["203.0.113.7:0", "no-such-host.invalid:0"])
def test_an_address_that_is_not_ours_is_a_configuration_error(figures: Figures, address: str) -> None:
    with pytest.raises(ConfigError, match="--metrics-address"):
        MetricsServer(address, figures)


def test_a_port_can_be_taken_again_at_once(figures: Figures) -> None:
    first = MetricsServer("127.0.0.1:0", figures)
    assert get(f"http://127.0.0.1:{first.port}/healthz")[0] == 200
    first.close()
    second = MetricsServer(f"127.0.0.1:{first.port}", figures)
    assert get(f"http://127.0.0.1:{first.port}/healthz")[0] == 200
    second.close()


def test_only_the_given_address_is_bound(server: MetricsServer) -> None:
    # All of 127/8 is loopback on Linux, so another address of it shows what a wildcard would have taken.
    with socket.socket() as client:
        client.settimeout(5)
        assert client.connect_ex(("127.0.0.2", server.port)) != 0


def test_an_ipv6_address_is_written_in_brackets(figures: Figures) -> None:
    try:
        server = MetricsServer("[::1]:0", figures)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    assert get(f"http://[::1]:{server.port}/healthz") == (200, "alive\n")
    server.close()
