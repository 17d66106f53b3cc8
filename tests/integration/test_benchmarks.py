"""The benchmarks run, and tell what they promise to tell; their figures are `make bench`'s business."""

import json
import subprocess
import sys
from pathlib import Path

from tests.fix_kafka import choose_broker

ROOT = Path(__file__).parents[2]


def run(*args: str) -> str:
    """Its own servers, whatever the tests use."""
    choice = choose_broker()
    broker = "tansu" if choice.bootstrap else choice.kind
    done = subprocess.run(
        [sys.executable, "-m", *args, "--broker", broker],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_small_drain_is_measured_beside_its_yardstick(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    out = run("benchmarks", "--rows", "2000", "--runs", "1", "--only", "drain", "--json", str(output))
    result = json.loads(output.read_text())
    assert {"parts", "drain", "growth", "scale", "latency", "idle", "bars", "void"} == result.keys()
    assert result["void"] == []
    assert [drain["shape"]["rows"] for drain in result["drain"].values()] == [2000, 400]
    for drain in result["drain"].values():
        (contents,) = drain["topics"]
        assert contents["records"] == drain["shape"]["rows"]
        assert drain["ratio"] > 0
        assert drain["floor_ratio"] > 0
        assert drain["cpu_seconds_per_million"] > 0
        assert drain["peak_rss_bytes"] > 10e6
    for bar in result["bars"]:
        assert f"{bar['name']} " in out


def test_what_a_purge_costs_those_who_insert_is_measured() -> None:
    out = run("benchmarks.purge", "--seconds", "8", "--rate", "200", "--backlog", "2000", "--ways", "off,delete")
    found, end = json.JSONDecoder().raw_decode(out)
    assert [one["way"] for one in found] == ["off", "delete"]
    for one in found:
        assert one["rows"] == 1600
        assert one["insert_p99_ms"] > 0
        assert one["peak_bytes"] > 0
        assert one["drained_per_second"] > 0
    assert [one["purged"] > 0 for one in found] == [False, True]
    assert "delete: insert p99" in out[end:]
