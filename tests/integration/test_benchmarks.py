"""The benchmarks run, and tell what they promise to tell; their figures are `make bench`'s business."""

import json
import subprocess
import sys
from pathlib import Path

from tests.fix_kafka import choose_broker

ROOT = Path(__file__).parents[2]


def test_a_small_drain_is_measured_beside_its_yardstick(tmp_path: Path) -> None:
    choice = choose_broker()
    broker = "tansu" if choice.bootstrap else choice.kind  # the benchmark starts its own
    output = tmp_path / "result.json"
    args = ["--rows", "2000", "--runs", "1", "--only", "drain", "--broker", broker, "--json", str(output)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert {"parts", "drain", "latency", "idle", "bars", "void"} == result.keys()
    assert result["void"] == []
    assert [drain["rows"] for drain in result["drain"].values()] == [2000, 400]
    for drain in result["drain"].values():
        (contents,) = drain["topics"]
        assert contents["records"] == drain["rows"]
        assert drain["ratio"] > 0
        assert drain["cpu_seconds_per_million"] > 0
        assert drain["peak_rss_bytes"] > 10e6
    for bar in result["bars"]:
        assert f"{bar['name']} " in done.stdout
