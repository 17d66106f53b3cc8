"""G1 to G9, each tried for real: one function a gate. It returns what it found, or raises for a promise not kept.

A relay is started with the options that a gate needs and used on by the next one if it needs the same. Waits are for
conditions; where "nothing happens" is the promise, the wait says how long.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

from cdc_outbox.inbox import Inbox
from cdc_outbox.scratch import Database
from cdc_outbox.scratch_worker import Record
from cdc_outbox.trial import NO_PURGE, PATIENCE_SECONDS, SOON_PURGED, Found, Load, Trial, must
from cdc_outbox.visibility_trial import visible

ROUNDS = 5
KILLS = 2
IDLE_SECONDS, IDLE_PATIENCE_SECONDS = 5.0, 12.0
EFFECTS = 200
"""Repeated jobs that a worker does again."""

QUESTIONS = """
select pid::text, query_start::text, pg_stat_clear_snapshot()::text from pg_stat_activity
where application_name = %s order by pid"""
TRANSACTIONS = "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()"


def before_the_commit(trial: Trial) -> Found:
    trial.relay(*NO_PURGE)
    waits, rows = [], 0
    for _ in range(ROUNDS):
        still_open = trial.stage("g1", 20, on=trial.open)
        trial.receive(trial.stage("g1"))  # committed later: the relay has read past the open rows
        early = trial.worker.ids.intersection(still_open)
        must(not early, f"{len(early)} rows reached Kafka before their commit")
        start = time.monotonic()
        trial.open.commit()
        trial.receive(still_open)
        waits.append((time.monotonic() - start) * 1000)
        rows += len(still_open)
    return Found(
        "rows in open transactions, while later ones commit; then the commit",
        {"rows": rows, "early": 0, "ms to Kafka": statistics.median(waits)},
    )


def rolled_back(trial: Trial) -> Found:
    trial.relay(*NO_PURGE)
    undone, kept = [], []
    for _ in range(ROUNDS):
        undone += trial.stage("g2", 10, on=trial.open)
        trial.open.rollback()
        kept += trial.stage("g2", on=trial.open)
        trial.open.execute("savepoint here")
        undone += trial.stage("g2", 10, on=trial.open)
        trial.open.execute("rollback to savepoint here")
        kept += trial.stage("g2", on=trial.open)
        trial.open.commit()
    trial.receive(kept)
    arrived = trial.worker.ids.intersection(undone)
    must(not arrived, f"{len(arrived)} rows that were rolled back reached Kafka")
    return Found(
        "rollbacks, and rollbacks to a savepoint, between commits",
        {"rows": len(kept), "rolled back": len(undone), "arrived of these": 0},
    )


def killed(trial: Trial) -> Found:
    trial.stop()
    held = trial.stage("g3", 200)
    with trial.unacknowledged(len(held), *NO_PURGE):
        trial.read_for(1.0)  # what is confirmed too early is confirmed by then
    load = kill_under_load(trial, "g3", KILLS)
    trial.relay(*NO_PURGE)
    committed = held + load.committed
    trial.receive_all("g3", committed)
    arrived = trial.worker.ids.intersection(load.rolled_back)
    must(not arrived, f"{len(arrived)} rows that were rolled back reached Kafka")
    received = len(trial.of("g3")) - 1
    return Found(
        "kill -9: with rows read and not sent, and under a load of commits and rollbacks",
        {"rows": len(committed), "kills": KILLS + 1, "lost": 0, "repeats": received - len(committed)},
    )


def kill_under_load(trial: Trial, gate: str, kills: int) -> Load:
    with Load(trial, gate) as load:
        for _ in range(kills):
            relay = trial.relay(*NO_PURGE)
            enough = len(trial.worker.records) + random.randint(100, 400)
            trial.read_until(lambda enough=enough: len(trial.worker.records) >= enough, "rows under load")  # type: ignore[misc]
            relay.kill9()
    return load


def acknowledged(trial: Trial) -> Found:
    trial.stop()
    rows = trial.stage("g4", 100)
    with trial.unacknowledged(len(rows), "--purge-every", "500ms"):
        trial.purge()
        gone = len(rows) - len(trial.rows(rows))
        must(gone == 0, f"{gone} rows deleted that Kafka had not acknowledged")
    trial.relay(*SOON_PURGED)
    start = time.monotonic()
    trial.receive(rows)
    trial.until(lambda: not trial.rows(rows), "the purge of what Kafka acknowledged")
    return Found(
        "purges, in the relay and apart, while rows are read and not sent; then with Kafka",
        {"rows": len(rows), "deleted too early": 0, "ms to an empty table": (time.monotonic() - start) * 1000},
    )


def exactly_those(trial: Trial) -> Found:
    relay = trial.relay(*NO_PURGE)
    low = trial.stage("g5", 50, on=trial.open)
    high = trial.stage("g5", 50)
    trial.receive(high)
    with contextlib.closing(trial.scratch.connect()) as listener:
        listener.execute(f'listen "{trial.scratch.name}"'.encode())
        relay.pause()
        purge = trial.scratch.start("purge")
        # It has looked at the table, and asks the relay, which is paused, for a position.
        must(
            any(True for _ in listener.notifies(timeout=PATIENCE_SECONDS, stop_after=1)), "the purge asked for nothing"
        )
        trial.open.commit()
        relay.resume()
    purge.wait(PATIENCE_SECONDS)
    if purge.exit_code != 0:
        purge.raise_failure("did not end")
    wrongly = len(low) - len(trial.rows(low))
    must(wrongly == 0, f"{wrongly} rows deleted that the purge had not seen")
    left = len(trial.rows(high))
    must(left == 0, f"{left} relayed rows were not deleted")
    trial.receive(low)
    trial.purge()
    left = len(trial.rows(low))
    must(left == 0, f"{left} relayed rows were not deleted")
    return Found(
        "low ids that commit while rows with higher ones are being purged",
        {"rows": len(low) + len(high), "deleted wrongly": 0, "left": 0},
    )


def one_at_a_time(trial: Trial) -> Found:
    first = trial.relay(*NO_PURGE)
    second = trial.standby(*NO_PURGE)
    second.wait_for("standby: ", PATIENCE_SECONDS)
    rows = [row for _ in range(50) for row in trial.stage("g6", 2)]
    trial.receive(rows)
    must(not second.log_contains("streaming "), "the second relay streamed beside the first")
    twice = len(trial.of("g6")) - len(rows)
    must(twice == 0, f"{twice} rows were sent twice while two relays ran")
    start = time.monotonic()
    first.kill9()
    more = trial.stage("g6", 100)
    trial.adopt(second, *NO_PURGE)
    trial.receive(more)
    return Found(
        "a second relay beside the first, which is then killed",
        {"rows": len(rows) + len(more), "sent twice": 0, "ms to take over": (time.monotonic() - start) * 1000},
    )


def idle(trial: Trial) -> Found:
    trial.relay(*SOON_PURGED)
    rows = trial.stage("g7", 10)
    trial.receive(rows)
    trial.until(lambda: not trial.rows(rows), "the purge")
    questions, before = -1, None  # the first look is none
    # One transaction, so that looking adds none to the database's count.
    with contextlib.closing(trial.scratch.connect(autocommit=False)) as watch:
        begin = now = time.monotonic()
        transactions = 0
        since = now
        while now - since < IDLE_SECONDS:
            must(now - begin < IDLE_PATIENCE_SECONDS, f"{questions} questions in {now - begin:.0f} s without work")
            sessions = watch.execute(QUESTIONS, [trial.scratch.name]).fetchall()
            if [row[:2] for row in sessions] != before:
                before, since, questions = [row[:2] for row in sessions], now, questions + 1
                transactions = _transactions(watch)
            trial.read_for(0.25)
            now = time.monotonic()
        transactions = _transactions(watch) - transactions
    must(bool(before), "this role may not see the relay's sessions in pg_stat_activity")
    known = all(row[1] is not None for row in before or [])
    return Found(
        f"{len(before or [])} sessions of a relay with its purge, nothing to do",
        {"s": now - since, "questions": 0, "transactions in the database": transactions},
        "" if known else "track_activities is off: only the sessions were counted",
    )


def _transactions(db: Database) -> int:
    return int(str(db.execute(TRANSACTIONS).fetchall()[0][0]))


def at_least_once(trial: Trial) -> Found:
    for _ in range(5):
        if len(trial.worker.records) > len(trial.worker.ids):
            break
        load = kill_under_load(trial, "g9", 1)
        trial.relay(*NO_PURGE)
        trial.receive_all("g9", load.committed)
    same: dict[str, list[Record]] = defaultdict(list)
    for record in trial.worker.records:
        same[record.id].append(record)
    repeated = [records for records in same.values() if len(records) > 1]
    must(bool(repeated), "nothing was repeated after several kills, so nothing could be tried")
    differ = sum(len(set(records)) > 1 for records in repeated)
    must(differ == 0, f"{differ} repeats are not what was sent first")
    inbox, jobs = Inbox(trial.scratch.name), repeated[:EFFECTS]
    for record in (record for records in jobs for record in records):
        if inbox.once(trial.open, record.id):
            trial.open.execute("insert into effects values (%s)", [record.id])
        trial.open.commit()
    effects = trial.db.execute("select count(*), count(distinct id) from effects").fetchall()[0]
    must(effects == (len(jobs), len(jobs)), f"{effects[0]} effects of {len(jobs)} jobs")
    return Found(
        "all repeats so far compared with the first; a worker with an inbox does them again",
        {
            "rows": len(same),
            "repeats": len(trial.worker.records) - len(same),
            "done again": sum(map(len, jobs)),
            "effects": len(jobs),
        },
    )


ALL: Mapping[str, tuple[str, Callable[[Trial], Found]]] = {
    "G1": ("before the commit, nothing reaches Kafka", before_the_commit),
    "G2": ("a rollback takes the job with it", rolled_back),
    "G3": ("a crash at any instant loses nothing", killed),
    "G4": ("a row is deleted only after Kafka acknowledged it", acknowledged),
    "G5": ("the delete removes exactly the rows that were read", exactly_those),
    "G6": ("one relay at a time; a second one takes over", one_at_a_time),
    "G7": ("an idle relay asks the database nothing", idle),
    "G8": ("a job never arrives before its data is visible", visible),
    "G9": ("at least once; a repeat is recognisable", at_least_once),
}
