"""`make bench-purge`: what purging costs those who insert, and how large the table becomes without.

5,000 rows/s are inserted on a schedule (10 a transaction), and relayed, while relayed rows are left (`off`), deleted
in batches (`delete`, which is what the relay does), or dropped a partition at a time (`partitions`, a sketch of what
it could do instead). Then a backlog is drained, with and without a purge beside it. Autovacuum is on, as on any server.
"""

import argparse
import json
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context

import psycopg

from benchmarks.backlog import INSERT, Shape, load
from benchmarks.drain import drain_once
from benchmarks.rig import Rig, rig
from benchmarks.usage import RunFailed
from cdc_outbox.errors import PreconditionError
from tests.fix_command import Running
from tests.fix_postgres import Database
from tests.kafka_server import KafkaUnavailable
from tests.relay_rig import metric

WAYS = ("off", "delete", "partitions")
WRITERS = 4
ROWS_PER_TRANSACTION = 10
PURGE_SECONDS = 5.0
PARTITION_ROWS = 50_000
INSERT_MANY = INSERT.replace("(values (%s::int)) v (i) returning id", "generate_series(%s::int, %s::int) i")

_PARTITIONED = """
create table outbox (id bigint generated always as identity primary key, task text not null, args jsonb not null,
                     key text, headers jsonb, created_at timestamptz not null default now()) partition by range (id);
create table outbox_rest partition of outbox default"""

_SAMPLE = """
select pg_table_size(relid) + pg_indexes_size(relid), n_live_tup, n_dead_tup from pg_stat_user_tables
where relname like 'outbox%%' and relname !~ 'checkpoint|dead_letter|archive'"""


@dataclass(slots=True)
class Found:
    """Bytes with indexes; rows; milliseconds from sending the INSERT to the end of COMMIT; rows/s."""

    way: str
    rows: int = 0
    peak_bytes: int = 0
    last_bytes: int = 0
    peak_dead: int = 0
    peak_unrelayed: int = 0
    purged: int = 0
    insert_p50_ms: float = 0.0
    insert_p99_ms: float = 0.0
    insert_max_ms: float = 0.0
    late_p99_ms: float = 0.0
    relayed_per_second: float = 0.0
    drained_per_second: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.purge", description=__doc__)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--rate", type=int, default=5000, help="rows inserted a second")
    parser.add_argument("--backlog", type=int, default=500_000, help="rows to drain")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=WAYS, help=f"some of {','.join(WAYS)}")
    parser.add_argument("--broker", choices=("kafka", "tansu"), default="kafka")
    options = parser.parse_args()
    found = []
    try:
        with rig(options.broker, autovacuum="on") as parts:
            for way in options.ways:
                print(f"{time.strftime('%X')} {way} …", file=sys.stderr)
                found.append(_paced(parts, way, options.rate, options.seconds))
                if way != "partitions":
                    found[-1].drained_per_second = _drained(parts, way, options.backlog)
    except (KafkaUnavailable, PreconditionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps([asdict(one) for one in found], indent=1))
    print(_table(found))
    return 0


def _paced(parts: Rig, way: str, rate: int, seconds: float) -> Found:
    found = Found(way)
    with parts.database() as database, parts.topic() as topic:
        if way == "partitions":
            for statement in _PARTITIONED.split(";"):
                database.execute(statement)
        every = f"{PURGE_SECONDS:g}s" if way == "delete" else "off"
        with parts.relay(database, topic, "--purge-every", every) as relay:
            stop = threading.Event()
            watchers = [threading.Thread(target=_sample, args=(database, relay, found, stop))]
            if way == "partitions":
                watchers.append(threading.Thread(target=_drop_partitions, args=(database, found, stop)))
            for watcher in watchers:
                watcher.start()
            try:
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                    spent = pool.submit(_write_all, database.socket_dsn, rate, seconds).result()
                found.rows = len(spent) * ROWS_PER_TRANSACTION
                found.relayed_per_second = metric(relay, "cdc_outbox_relayed_rows_total") / seconds
                if way == "delete":
                    found.purged = int(metric(relay, "cdc_outbox_purged_rows_total"))
            finally:
                stop.set()
                for watcher in watchers:
                    watcher.join()
    taken, late = (sorted(column) for column in zip(*spent, strict=True))
    found.insert_p50_ms, found.insert_p99_ms = (1000 * taken[int(share * len(taken))] for share in (0.5, 0.99))
    found.insert_max_ms, found.late_p99_ms = 1000 * taken[-1], 1000 * late[int(0.99 * len(late))]
    return found


def _write_all(dsn: str, rate: int, seconds: float) -> list[tuple[float, float]]:
    """(seconds an insert took, seconds it came late), of each transaction; in a process of its own."""
    start = time.monotonic() + 1
    per_second = rate / ROWS_PER_TRANSACTION
    schedule = [start + number / per_second for number in range(int(per_second * seconds))]
    with ThreadPoolExecutor(WRITERS) as pool:
        parts = list(pool.map(_write, [dsn] * WRITERS, (schedule[writer::WRITERS] for writer in range(WRITERS))))
    return [one for part in parts for one in part]


def _write(dsn: str, schedule: list[float]) -> list[tuple[float, float]]:
    spent = []
    with psycopg.connect(dsn) as connection:
        for number, planned in enumerate(schedule):
            time.sleep(max(0.0, planned - time.monotonic()))  # nothing to wait for but the time itself
            began = time.monotonic()
            connection.execute(
                INSERT_MANY.encode(), (number * ROWS_PER_TRANSACTION + 1, (number + 1) * ROWS_PER_TRANSACTION)
            )
            connection.commit()
            spent.append((time.monotonic() - began, began - planned))
    return spent


def _sample(database: Database, relay: Running, found: Found, stop: threading.Event) -> None:
    with database.connect() as connection:
        while not stop.wait(1.0):
            rows = connection.execute(_SAMPLE.replace("%%", "%").encode()).fetchall()
            found.last_bytes = sum(size for size, _, _ in rows)
            found.peak_bytes = max(found.peak_bytes, found.last_bytes)
            found.peak_dead = max(found.peak_dead, sum(dead for _, _, dead in rows))
            found.peak_unrelayed = max(found.peak_unrelayed, int(metric(relay, "cdc_outbox_in_flight_rows")))


def _drop_partitions(database: Database, found: Found, stop: threading.Event) -> None:
    """Made ahead of need; dropped whole once the slot is confirmed past every row in it, and none came since."""
    made, dropped = 0, 0
    with database.connect() as connection:
        while True:
            last = connection.execute("select coalesce(max(id), 0) from outbox").fetchall()[0][0]
            while made * PARTITION_ROWS < last + 4 * PARTITION_ROWS:
                bounds = f"({made * PARTITION_ROWS}) to ({(made + 1) * PARTITION_ROWS})"
                connection.execute(f"create table outbox_{made} partition of outbox for values from {bounds}".encode())
                made += 1
            while (dropped + 1) * PARTITION_ROWS < last:
                look = f"select pg_current_wal_insert_lsn(), count(*) from outbox_{dropped}"
                fence, rows = connection.execute(look.encode()).fetchall()[0]
                confirmed = "select bool_and(confirmed_flush_lsn >= %s::pg_lsn) from pg_replication_slots"
                while not connection.execute(confirmed, (fence,)).fetchall()[0][0] and not stop.wait(0.05):
                    pass
                if stop.is_set() or not _drop(connection, f"outbox_{dropped}", rows):
                    break
                dropped, found.purged = dropped + 1, found.purged + rows
            if stop.wait(PURGE_SECONDS):
                return


def _drop(connection: "psycopg.Connection[tuple[object, ...]]", partition: str, rows: int) -> bool:
    try:
        with connection.transaction():
            connection.execute("set local lock_timeout = '100ms'")
            # The parent first, as an insert does: the other way round the two would deadlock.
            connection.execute("lock table only outbox in access exclusive mode")
            connection.execute(f"lock table {partition} in access exclusive mode".encode())
            if connection.execute(f"select count(*) from {partition}".encode()).fetchall()[0][0] != rows:
                return False
            connection.execute(f"drop table {partition}".encode())
            return True
    except psycopg.errors.LockNotAvailable:
        return False


def _drained(parts: Rig, way: str, rows: int) -> float:
    every = "500ms" if way == "delete" else "off"
    with parts.database() as database, parts.topic() as topic:
        slot = f"{database.name}_drain"
        parts.cdc_outbox("init-slot", "--dsn", database.socket_dsn, "--slot", slot)
        load(database, Shape(rows, 100))
        return rows / drain_once(parts, database, slot, topic, every).streaming_seconds


def _table(found: list[Found]) -> str:
    lines = [f"{'':<12}{'peak MB':>9}{'last MB':>9}{'peak dead':>11}{'in flight':>11}{'purged':>10}{'p50 ms':>8}"]
    lines[0] += f"{'p99 ms':>8}{'max ms':>8}{'late p99':>10}{'relayed/s':>11}{'drained/s':>11}"
    for one in found:
        lines.append(
            f"{one.way:<12}{one.peak_bytes / 1e6:>9.0f}{one.last_bytes / 1e6:>9.0f}{one.peak_dead:>11,}"
            f"{one.peak_unrelayed:>11,}{one.purged:>10,}{one.insert_p50_ms:>8.1f}{one.insert_p99_ms:>8.1f}"
            f"{one.insert_max_ms:>8.0f}{one.late_p99_ms:>10.1f}{one.relayed_per_second:>11,.0f}"
            f"{one.drained_per_second:>11,.0f}"
        )
    by_way = {one.way: one for one in found}
    if off := by_way.get("off"):
        for one in found:
            if one is not off:
                ratio = one.insert_p99_ms / off.insert_p99_ms
                lines.append(f"{one.way}: insert p99 {ratio:.2f} x of off (bar 1.5)")
                if one.drained_per_second:
                    fall = 1 - one.drained_per_second / off.drained_per_second
                    lines.append(f"{one.way}: the relay drains {100 * fall:.0f} % slower (bar 15)")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
