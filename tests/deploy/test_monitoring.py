"""Alerts and dashboard: what they name is what a relay serves, and Prometheus's own tool says when each alert fires."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from cdc_outbox.http import MetricsServer
from cdc_outbox.metrics import Figures
from tests.fix_command import scrape
from tests.watched.servers import promtool

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "cdc-outbox.rules.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "cdc-outbox.json").read_text(encoding="utf-8"))
SELECTOR = re.compile(r"\b(cdc_outbox_\w+)(?:\{([^}]*)\})?")
GRAFANAS = {"$__rate_interval": "5m", "$slot": ".*"}


def load(path: Path) -> Any:
    return YAML(typ="safe").load(path)


ALERTS = {rule["alert"]: rule for group in load(RULES)["groups"] for rule in group["rules"]}


def panel_expressions() -> list[str]:
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    for variable, value in GRAFANAS.items():
        found = [expression.replace(variable, value) for expression in found]
    return found


def run_promtool(*arguments: str | Path) -> str:
    done = subprocess.run([promtool(), *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def served() -> dict[str, set[str]]:
    """Sample -> its labels, as a fresh relay serves them."""
    server = MetricsServer("127.0.0.1:0", Figures("slot"))
    try:
        samples = scrape(f"http://127.0.0.1:{server.port}/metrics")
    finally:
        server.close()
    found: dict[str, set[str]] = {}
    for sample in samples:
        name, _, labels = sample.partition("{")
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def test_each_metric_and_label_that_an_alert_or_a_panel_names_is_served(served: dict[str, set[str]]) -> None:
    expressions = [*panel_expressions(), *(rule["expr"] for rule in ALERTS.values())]
    named = [found for expression in expressions for found in SELECTOR.findall(expression)]
    assert len(named) > len(ALERTS)
    for metric, matchers in named:
        assert metric in served
        assert set(re.findall(r"(\w+)\s*=~?", matchers)) <= served[metric], metric
    labels = {label for found in served.values() for label in found}
    for expression in expressions:
        for grouping in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
            assert set(grouping.split(", ")) <= labels, expression


def test_each_metric_is_on_the_dashboard(served: dict[str, set[str]]) -> None:
    shown = {metric for expression in panel_expressions() for metric, _ in SELECTOR.findall(expression)}
    stems = {name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name in served}
    asides = {"slot_active", "slot_read_timestamp_seconds", "last_confirm_timestamp_seconds"}
    assert {name.removesuffix("_bucket") for name in shown} == stems - {f"cdc_outbox_{name}" for name in asides}


def test_prometheus_takes_its_configuration_and_the_rules() -> None:
    run_promtool("check", "config", DEPLOY / "prometheus" / "prometheus.yml")


def test_each_alert_fires_when_it_should_and_is_silent_when_it_should() -> None:
    path = DEPLOY / "prometheus" / "cdc-outbox.test.yml"
    assert "SUCCESS" in run_promtool("test", "rules", path)
    cases = [case for test in load(path)["tests"] for case in test.get("alert_rule_test", [])]
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == ALERTS.keys()
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == ALERTS.keys()


def test_each_alert_says_how_bad_it_is_and_where_to_read_on() -> None:
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"


def test_each_panel_asks_what_prometheus_understands(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{n}", "expr": expression} for n, expression in enumerate(panel_expressions())]
    path = tmp_path / "panels.yml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    run_promtool("check", "rules", path)


def test_the_panels_have_numbers_of_their_own_and_lie_beside_each_other() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, panel["title"]
        cells |= own


def test_the_dashboard_asks_the_source_that_is_chosen_on_it() -> None:
    variables = {variable["name"]: variable["type"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource": "datasource", "slot": "query"}
    sources = [asker["datasource"] for panel in DASHBOARD["panels"] for asker in (panel, *panel["targets"])]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
