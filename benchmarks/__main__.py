"""`python -m benchmarks`: one run of everything, JSON to a file and a table to stdout.

Rates count from the moment a process says that it streams to its exit; `whole` is the ratio with both starts. The
yardstick, `pg_recvlogical` to /dev/null, takes turns with the relay, so that a noisy machine is noisy for both; so does
the floor, which tells what the two libraries cost. Exit 1 if a run is void: rows missing, repeated, or out of order. A
bar that is missed is only told.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from platform import python_version

import confluent_kafka
import psycopg

from benchmarks.backlog import Shape
from benchmarks.drain import drain
from benchmarks.growth import growth
from benchmarks.idle import idle
from benchmarks.latency import latency
from benchmarks.report import Report, bars, table
from benchmarks.rig import Rig, rig
from benchmarks.scale import scale
from benchmarks.usage import RunFailed
from cdc_outbox import __version__
from cdc_outbox.errors import PreconditionError
from tests.kafka_server import KafkaUnavailable

RESULTS = Path(__file__).with_name("results")
RECORD = Path(__file__).with_name("recorded.json")
PARTS = ("drain", "latency", "big", "idle", "growth", "scale")
USUAL = PARTS[:4]
RATES = (200, 1000)
LATENCY_SECONDS = 20.0
IDLE_SECONDS = 60.0


def main() -> int:
    options = _options()
    try:
        with rig(options.broker) as parts:
            report = Report(_parts(parts))
            for part in options.only:
                _try(report, part, lambda part=part: _run(part, parts, report, options))  # type: ignore[misc]
    except (KafkaUnavailable, PreconditionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    path = options.json or RESULTS / time.strftime("%Y%m%d-%H%M%S.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    print(table(report, recorded))
    if options.record and not report.void:
        RECORD.write_text(
            json.dumps(recorded | {bar.name: round(bar.value, 3) for bar in bars(report)}, indent=1) + "\n"
        )
    return 1 if report.void else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of a backlog; a fifth in single-row ones")
    parser.add_argument("--runs", type=int, default=5, help="of each drain; medians are reported")
    parser.add_argument(
        "--only", type=_only, default=USUAL, help=f"some of {','.join(PARTS)}; the first four by default"
    )
    parser.add_argument("--broker", choices=("kafka", "tansu"), default="kafka")
    parser.add_argument("--json", type=Path, help="where to write; benchmarks/results/ by default")
    parser.add_argument("--record", action="store_true", help=f"keep it in {RECORD.name}, to be compared with")
    return parser.parse_args()


def _only(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := [part for part in chosen if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(unknown)}")
    return chosen


def _try(report: Report, part: str, run: Callable[[], None]) -> None:
    print(f"{time.strftime('%X')} {part} …", file=sys.stderr)
    try:
        run()
    except RunFailed as error:
        report.failed.append(f"{part}: {error}")


def _run(part: str, parts: Rig, report: Report, options: argparse.Namespace) -> None:
    rows: int = options.rows
    match part:
        case "drain":
            report.drains["100 rows a transaction"] = drain(parts, Shape(rows, 100), options.runs, floor=True)
            report.drains["1 row a transaction"] = drain(parts, Shape(rows // 5, 1), options.runs, floor=True)
        case "big":
            report.drains["all rows in one transaction"] = drain(parts, Shape(rows, rows), 1)
        case "latency":
            report.latencies += [latency(parts, rate, LATENCY_SECONDS) for rate in RATES]
        case "idle":
            report.idle = idle(parts, IDLE_SECONDS)
        case "growth":
            report.growth = growth(parts, rows // 5, options.runs)
        case "scale":
            report.scale = scale(parts, rows)


def _parts(parts: Rig) -> dict[str, object]:
    with psycopg.connect(parts.postgres.socket_dsn()) as connection:
        version = connection.info.parameter_status("server_version")
    return {
        "cdc-outbox": __version__,
        "PostgreSQL": version,
        "broker": parts.broker.kind,
        "librdkafka": confluent_kafka.libversion()[0],
        "Python": python_version(),
        "processors": len(os.sched_getaffinity(0)),
        "load before": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    sys.exit(main())
