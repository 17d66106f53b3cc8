"""Prometheus itself takes the page: its linter, and a server that scrapes it."""

import subprocess

from cdc_outbox.http import MetricsServer
from cdc_outbox.metrics import Figures
from tests.fix_command import get
from tests.relay_rig import metrics_url
from tests.slot_rig import SlotRig
from tests.waiting import eventually
from tests.watched.rig import page
from tests.watched.servers import Prometheus, promtool


def lint(text: str) -> str:
    done = subprocess.run([promtool(), "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_promtool_has_nothing_to_say_of_a_fresh_relay() -> None:
    server = MetricsServer("127.0.0.1:0", Figures("slot"))
    try:
        assert lint(get(f"http://127.0.0.1:{server.port}/metrics")[1]) == ""
    finally:
        server.close()


def test_promtool_finds_what_is_wrong_with_a_page() -> None:
    """Else its silence would say nothing."""
    done = subprocess.run([promtool(), "check", "metrics"], input="aB_count 1\n", capture_output=True, text=True)
    assert done.returncode != 0


def test_a_prometheus_scrapes_a_relay(ready: SlotRig) -> None:
    relay = ready.stream()
    ready.wait_for(ready.stage(count=3))
    seen = page(relay)
    assert lint(get(f"{seen.url}/metrics")[1]) == ""
    slot = f'{{slot_name="{ready.slot}"}}'
    with Prometheus(metrics_url(relay).removeprefix("http://")).start() as prometheus:
        rows = f"cdc_outbox_relayed_rows_total{slot}"
        eventually(lambda: prometheus.value(rows) == 3, 20, "the rows are counted")
        assert prometheus.value("up") == 1
        assert prometheus.value(f"cdc_outbox_slot_active{slot}") == 1
        assert prometheus.value(f"cdc_outbox_slot_safe_wal_bytes{slot}") == float("inf")
        assert list(prometheus.query("cdc_outbox_slot_wal_status == 1")) != []
        quantile = "histogram_quantile(0.5, sum by (le) (cdc_outbox_commit_to_ack_seconds_bucket))"
        assert 0 < (prometheus.value(quantile) or 0) < 10
        ready.wait_for(ready.stage(count=2))
        eventually(lambda: prometheus.value(rows) == 5, 20, "and those that come after")
        assert relay.terminate() == 0
        eventually(lambda: prometheus.value("up") == 0, 20, "a relay that is gone is noticed")
