"""Dockerfile, docker-compose.yml and the manifests, without an engine: what can be held of them as files."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from cdc_outbox.cli import cli
from cdc_outbox.config import Settings, seconds
from cdc_outbox.options import commands

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")


def load_all(path: Path) -> list[Any]:
    return list(YAML(typ="safe").load_all(path))


COMPOSE = load_all(COMPOSE_FILE)[0]
SERVICES: dict[str, Any] = COMPOSE["services"]
ONCE = {"topic", "init-slot"}
"""Services that do something and end."""
DRAIN_SECONDS = Settings(dsn="").shutdown_timeout


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)


# -- the image


def test_the_image_holds_enough_to_build_the_wheel_from(tmp_path: Path) -> None:
    """The instructions COPY, carried out in a folder, as far as the ignore file lets them."""
    kept = {line[1:] for line in (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().split() if line[0] == "!"}
    for *sources, target in [line.split() for line in instructions("COPY") if "--from" not in line]:
        for source in sources:
            assert source in kept
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            copy(ROOT / source, tmp_path / target / (source if target == "./" else ""))
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {"cdc_outbox/page.html", "cdc_outbox/sql/role_relay.sql"} <= set(archive.namelist())


def test_the_image_is_slim_and_starts_the_command_itself_and_not_as_root() -> None:
    assert all(source.split()[0].endswith("-slim") for source in instructions("FROM"))
    assert json.loads(instructions("ENTRYPOINT")[0]) == ["cdc-outbox"]
    assert json.loads(instructions("CMD")[0]) == ["stream"]
    ((uid, gid),) = [line.split(":") for line in instructions("USER")]
    assert int(uid) > 0
    assert int(gid) > 0


# -- docker compose


def test_docker_compose_yml_is_what_the_compose_specification_allows() -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE_FILE)]
    done = subprocess.run(check, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_service_that_stays_has_a_health_check() -> None:
    assert {name for name, service in SERVICES.items() if "healthcheck" not in service} == ONCE


def test_services_wait_for_each_other_by_condition() -> None:
    waits = {name: set(service.get("depends_on", {})) for name, service in SERVICES.items()}
    assert waits["relay"] == ONCE
    for service in SERVICES.values():
        for other, how in service.get("depends_on", {}).items():
            if other in ONCE:
                assert how["condition"] == "service_completed_successfully"
            elif how["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[other]
            else:  # monitoring is for relays that are not healthy
                assert (other, how["condition"]) == ("relay", "service_started")


def test_every_port_is_on_loopback_and_each_only_once() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert len(ports) == len(set(ports))


def test_monitoring_is_asked_for_and_the_rest_is_not() -> None:
    assert {name for name, service in SERVICES.items() if service.get("profiles")} == {"prometheus", "grafana"}


def test_what_is_mounted_or_built_is_there_and_volumes_are_declared() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).is_dir() if source.startswith(".") else source in COMPOSE["volumes"]
        if "build" in service:
            assert (ROOT / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_the_provisioned_files_name_what_compose_brings() -> None:
    deploy = ROOT / "deploy"
    (scrape,) = load_all(deploy / "prometheus" / "prometheus.yml")[0]["scrape_configs"]
    host, port = scrape["static_configs"][0]["targets"][0].split(":")
    assert SERVICES[host]["environment"]["CDC_OUTBOX_METRICS_ADDRESS"].endswith(f":{port}")
    rules = (deploy / "prometheus" / "cdc-outbox.rules.yml").read_text(encoding="utf-8")
    assert f'up{{job="{scrape["job_name"]}"}}' in rules
    provisioning = deploy / "grafana" / "provisioning"
    (source,) = load_all(provisioning / "datasources" / "prometheus.yml")[0]["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = load_all(provisioning / "dashboards" / "cdc-outbox.yml")[0]["providers"]
    mounts = {volume.split(":")[1]: volume.split(":")[0] for volume in SERVICES["grafana"]["volumes"]}
    dashboards = ROOT / mounts[provider["options"]["path"]]
    assert [path.name for path in dashboards.iterdir()] == ["cdc-outbox.json"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/cdc-outbox.json"


def test_the_containers_of_ours_have_no_more_than_they_need_and_time_to_drain() -> None:
    for name in ("relay", "init-slot"):
        assert SERVICES[name]["read_only"] is True
        assert SERVICES[name]["cap_drop"] == ["ALL"]
        assert SERVICES[name]["command"][0] in commands(cli)
    assert seconds(SERVICES["relay"]["stop_grace_period"]) > DRAIN_SECONDS


# -- Kubernetes


def pods() -> dict[str, Any]:
    """By kind, the pod that each manifest makes."""
    found = [one for path in (ROOT / "deploy" / "kubernetes").iterdir() for one in load_all(path)]
    return {one["kind"]: one["spec"]["template"]["spec"] for one in found if "template" in one["spec"]}


@pytest.mark.parametrize("kind", ["Deployment", "Job"])
def test_a_pod_is_not_root_writes_nowhere_and_has_no_token(kind: str) -> None:
    pod = pods()[kind]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert f"USER {pod['securityContext']['runAsUser']}:" in DOCKERFILE
    assert pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    assert container["args"][0] in commands(cli)
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_there_is_one_relay_and_it_is_gone_before_the_next_one_starts() -> None:
    manifests = load_all(ROOT / "deploy" / "kubernetes" / "relay.yaml")
    (deployment,) = [one for one in manifests if one["kind"] == "Deployment"]
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert pods()["Deployment"]["terminationGracePeriodSeconds"] > DRAIN_SECONDS
    (service,) = [one for one in manifests if one["kind"] == "Service"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_the_probes_ask_pages_that_exist_and_only_readiness_asks_for_more_than_life() -> None:
    (container,) = pods()["Deployment"]["containers"]
    (port,) = container["ports"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert variables["CDC_OUTBOX_METRICS_ADDRESS"] == f"0.0.0.0:{port['containerPort']}"
    pages = {name: probe["httpGet"]["path"] for name, probe in container.items() if name.endswith("Probe")}
    assert pages == {"livenessProbe": "/healthz", "startupProbe": "/healthz", "readinessProbe": "/readyz"}


def test_each_variable_that_a_container_gets_is_one_that_the_command_reads() -> None:
    known = {name for command in commands(cli).values() for option in command.params for name in _variables(option)}
    (deployment,) = pods()["Deployment"]["containers"]
    given = {variable["name"] for variable in deployment["env"]} | SERVICES["relay"]["environment"].keys()
    given |= set(re.findall(r"\b(CDC_OUTBOX_\w+)=", DOCKERFILE))
    assert given <= known


def _variables(option: Any) -> list[str]:
    return [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or [])
