"""What a shard costs the server: CPU of the walsender for a backlog of which its row filter lets a part through.

    python -m benchmarks.shards [--rows 1000000] [--runs 3]

Each slot decodes the WAL of the whole database, so N of them cost N decodings; only what is sent is divided. The table
shows both, and what N walsenders would carry if each had a core for itself. CPU time, since a busy machine stretches
every other measure.
"""

import argparse
import subprocess
from statistics import median

from benchmarks.backlog import Shape, load
from benchmarks.usage import cpu_seconds, environment
from cdc_outbox.config import Shard
from cdc_outbox.embedded import PostgresServer, postgres_bindir
from cdc_outbox.event import RecordFormat
from cdc_outbox.objects import Column
from cdc_outbox.row_filter import row_filter
from tests.fix_command import EXECUTABLE
from tests.fix_postgres import Database
from tests.waiting import eventually

COUNTS = (1, 2, 3, 4, 8)
COLUMNS = [Column(name, "text", False, False) for name in ("task", "key")]
SENT = """
select pid, sent_lsn >= %s
from pg_stat_replication join pg_replication_slots on active_pid = pid where slot_name = %s"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shards", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    with PostgresServer(postgres_bindir(18), settings={"max_replication_slots": 40}) as server:
        database = Database(server.start(), "shards")
        database.create()
        found = _measure(database, options.rows, options.runs)
    print(_table(found, options.rows))
    return 0


def _filters() -> dict[str, str]:
    """Of one shard of N; `none` lets nothing through, `all` is no filter."""
    filters = {str(count): f"where ({row_filter(Shard(1, count), COLUMNS, RecordFormat())})" for count in COUNTS}
    return {"all": "", **filters, "none": f"where ({row_filter(Shard(2, 2), COLUMNS, RecordFormat())} and false)"}


def _measure(database: Database, rows: int, runs: int) -> dict[str, float]:
    subprocess.run([EXECUTABLE, "init-slot", "--dsn", database.socket_dsn], env=environment(), check=True)
    database.execute("alter table outbox alter key set default md5(random()::text)")
    slots = [(name, condition, f"s_{name}_{run}") for run in range(runs) for name, condition in _filters().items()]
    for _, condition, slot in slots:
        database.execute(f"create publication {slot} for table outbox {condition} with (publish = 'insert')")
        database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
    end = load(database, Shape(rows, 100))
    seconds: dict[str, list[float]] = {}
    for name, _, slot in slots:
        seconds.setdefault(name, []).append(_walsender(database, slot, end))
        print(f"{name}: {seconds[name][-1]:.2f} s", flush=True)
    return {name: median(several) for name, several in seconds.items()}


def _walsender(database: Database, slot: str, end: str) -> float:
    """Its CPU seconds until everything is sent, to a client that throws it away."""
    args = ["--start", "-f", "/dev/null", "-d", database.socket_dsn, "--slot", slot]
    args += ["-o", "proto_version=1", "-o", f"publication_names={slot}"]
    client = subprocess.Popen([database.server.bindir / "pg_recvlogical", *args], env=environment())
    try:

        def sent() -> float:
            for pid, done in database.fetch(SENT, (end, slot)):
                if done:
                    return cpu_seconds(pid)
            return 0.0

        return eventually(sent, 600, f"{slot} has sent everything")
    finally:
        client.kill()
        client.wait()


def _table(found: dict[str, float], rows: int) -> str:
    lines = ["shards  CPU s per million rows, each walsender  rows/s of all, a core each"]
    for count in COUNTS:
        each = found[str(count)] / rows * 1e6
        lines.append(f"{count:>6}  {each:>38.2f}  {1e6 / each:>25,.0f}")
    whole, nothing = (found[name] / rows * 1e6 for name in ("all", "none"))
    lines.append(f"no filter {whole:.2f}; a filter that lets nothing through {nothing:.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
