"""G1 to G9, each tried for real: one function a gate. It returns what it found, or raises for a promise not kept.

A relay is started with the options that a gate needs and used on by the next one if it needs the same. Waits are for
conditions; where "nothing happens" is the promise, the wait says how long.
"""

from __future__ import annotations

import contextlib
import random
import socket
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from cdc_outbox.errors import OutboxError
from cdc_outbox.inbox import Inbox
from cdc_outbox.scratch import Database, Record, Relay, Scratch

NO_PURGE = ("--purge-every", "off")
SOON_PURGED = ("--purge-every", "300ms")
PATIENCE_SECONDS = 15.0
ROUNDS = 5
KILLS = 3
IDLE_SECONDS, IDLE_PATIENCE_SECONDS = 5.0, 20.0
COMMITTERS, COMMITS, COMMIT_SECONDS = 12, 1000, 4.0
EFFECTS = 200
"""Repeated jobs that a worker does again."""

COMMIT_LOOP = """
do $$
declare deadline timestamptz := clock_timestamp() + interval '%s s'; row bigint;
begin
    for number in 1 .. %s loop
        exit when clock_timestamp() > deadline;
        insert into visible default values returning n into row;
        insert into outbox (task, args) values ('%s', jsonb_build_object('n', row));
        commit;
    end loop;
end $$"""
"""On the server, so that many sessions commit at once and no client is in the way."""

QUESTIONS = """
select pid::text, query_start::text, pg_stat_clear_snapshot()::text from pg_stat_activity
where application_name = %s order by pid"""
TRANSACTIONS = "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()"


@dataclass(frozen=True, slots=True)
class Found:
    tried: str
    figures: Mapping[str, float]
    note: str = ""


class Broken(OutboxError):
    """A promise was not kept."""


class Trial:
    """The application's and the operator's hands."""

    def __init__(self, scratch: Scratch, deadline: float) -> None:
        """Nothing is waited for beyond `deadline` (monotonic)."""
        self.scratch, self.deadline = scratch, deadline
        self.worker = scratch.worker
        self.db = scratch.connect()
        self.open = scratch.connect(autocommit=False)
        self._relay: Relay | None = None
        self._options: tuple[str, ...] = ()

    # -- relays -------------------------------------------------------------------------------------------------

    def relay(self, *options: str) -> Relay:
        """One that streams, with these options."""
        if self._relay is not None and self._relay.running and self._options == options:
            return self._relay
        self.stop()
        return self.adopt(self.standby(*options), *options)

    def adopt(self, relay: Relay, *options: str) -> Relay:
        relay.wait_for("streaming ", PATIENCE_SECONDS)
        self._relay, self._options = relay, options
        return relay

    def standby(self, *options: str) -> Relay:
        """One that streams once it may."""
        return self.scratch.start("stream", "--metrics-address", "127.0.0.1:0", *options)

    def stop(self) -> None:
        if self._relay is not None:
            self._relay.resume()
            self._relay.stop()
            self._relay = None

    @contextlib.contextmanager
    def without_kafka(self, rows: int, *options: str) -> Iterator[Relay]:
        """A relay that holds `rows` rows, and nobody takes them; killed at the end."""
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # and no listen(): refused
            server = f"127.0.0.1:{nobody.getsockname()[1]}"
            # A topic by column is not looked for at the start, which would take seconds.
            relay = self.adopt(self.standby("-b", server, "-t", "{task}", *options), server)
            self.until(lambda: relay.figure("cdc_outbox_in_flight_rows") >= rows, "rows in a relay that has no Kafka")
            yield relay
            relay.kill9()

    def purge(self) -> None:
        """One round, run apart."""
        purge = self.scratch.start("purge")
        purge.wait(PATIENCE_SECONDS)
        if purge.exit_code != 0:
            purge.raise_failure("did not end")

    # -- rows ---------------------------------------------------------------------------------------------------

    def stage(self, gate: str, count: int = 1, *, on: Database | None = None) -> list[str]:
        return self.scratch.stage(on or self.db, gate, count)

    def rows(self, ids: Iterable[str]) -> set[str]:
        """Which of these are in the table."""
        found = self.db.execute("select id::text from outbox where id::text = any(%s)", [list(ids)]).fetchall()
        return {str(row[0]) for row in found}

    def of(self, gate: str) -> list[Record]:
        task = self.scratch.task(gate)
        return [record for record in self.worker.records if record.task == task]

    # -- waiting ------------------------------------------------------------------------------------------------

    def read_until(
        self, done: Callable[[], bool], what: str, seen: Callable[[list[Record]], None] | None = None
    ) -> None:
        """Reads the topic meanwhile."""
        if not self.worker.read_until(done, self._patience(), seen):
            raise Broken(f"waited in vain for {what}")

    def receive(self, ids: Iterable[str], seen: Callable[[list[Record]], None] | None = None) -> None:
        """Until all of them have reached Kafka."""
        wanted = set(ids)
        if not self.worker.read_until(lambda: wanted <= self.worker.ids, self._patience(), seen):
            raise Broken(f"{len(wanted - self.worker.ids)} of {len(wanted)} committed rows did not reach Kafka")

    def read_for(self, seconds: float) -> None:
        self.worker.read_until(lambda: False, seconds)

    def until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._patience()
        while not done():
            if time.monotonic() > deadline:
                raise Broken(f"waited in vain for {what}")
            time.sleep(0.02)  # nothing to wait on: another process gets there

    def _patience(self) -> float:
        return max(0.0, min(PATIENCE_SECONDS, self.deadline - time.monotonic()))


class Load:
    """Two writers; one transaction in ten rolls back."""

    def __init__(self, trial: Trial, gate: str) -> None:
        self.committed: list[str] = []
        self.rolled_back: list[str] = []
        self._trial, self._gate = trial, gate
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        connections = [trial.scratch.connect(autocommit=False) for _ in range(2)]
        self._threads = [threading.Thread(target=self._write, args=(db,), daemon=True) for db in connections]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)
        if self._failure is not None:
            raise self._failure

    def _write(self, db: Database) -> None:
        try:
            while not self._stop.wait(0.004):
                ids = self._trial.stage(self._gate, random.randint(1, 5), on=db)
                if random.random() < 0.1:
                    db.rollback()
                    self.rolled_back += ids
                else:
                    db.commit()
                    self.committed += ids
        except BaseException as failure:  # raised where the load ends
            self._failure = failure


def must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Broken(otherwise)


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
    with trial.without_kafka(len(held), *NO_PURGE):
        trial.read_for(1.0)  # what is confirmed too early is confirmed by then
    load = kill_under_load(trial, "g3", KILLS)
    trial.relay(*NO_PURGE)
    committed = held + load.committed
    trial.receive(committed)
    arrived = trial.worker.ids.intersection(load.rolled_back)
    must(not arrived, f"{len(arrived)} rows that were rolled back reached Kafka")
    received = len(trial.of("g3"))
    return Found(
        "kill -9: with rows in flight and Kafka away, and under a load of commits and rollbacks",
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
    with trial.without_kafka(len(rows), "--purge-every", "500ms"):
        trial.purge()
        gone = len(rows) - len(trial.rows(rows))
        must(gone == 0, f"{gone} rows deleted that Kafka had not acknowledged")
    trial.relay(*SOON_PURGED)
    start = time.monotonic()
    trial.receive(rows)
    trial.until(lambda: not trial.rows(rows), "the purge of what Kafka acknowledged")
    return Found(
        "purges, in the relay and apart, while Kafka is away; then with Kafka",
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


def visible(trial: Trial) -> Found:
    trial.relay(*SOON_PURGED)
    early, arrived = 0, set()
    task = trial.scratch.task("g8")

    def look(batch: list[Record]) -> None:
        nonlocal early
        wanted = {record.n for record in batch if record.task == task}
        found = trial.db.execute("select n from visible where n = any(%s)", [list(wanted)]).fetchall()
        early += len(wanted) - len(found)
        arrived.update(wanted)

    names = str(trial.db.execute("select current_setting('synchronous_standby_names')").fetchall()[0][0])
    note, level = "no synchronous standby here: the longest wait for visibility was not tried", "on"
    if names:
        answers = _commit_waits_for_standby(trial, look)
        level = "remote_apply" if answers else "local"
        note = "the synchronous standby answers" if answers else "a commit waited for the standby, and the job with it"
        must(early == 0, f"{early} jobs reached Kafka before their data was visible (a commit waited for the standby)")
    done: list[bool] = []
    loop = COMMIT_LOOP % (COMMIT_SECONDS, COMMITS, task)
    for _ in range(COMMITTERS):
        db = trial.scratch.connect()
        db.execute(f"set synchronous_commit = {level}".encode())
        threading.Thread(target=lambda db=db: done.append(db.execute(loop.encode()) is not None), daemon=True).start()
    trial.read_until(lambda: len(done) == COMMITTERS, "the committers", look)
    rows = {row[0] for row in trial.db.execute("select n from visible").fetchall()}
    trial.read_until(lambda: rows <= arrived, "their rows in Kafka", look)
    must(early == 0, f"{early} of {len(rows)} jobs reached Kafka before their data was visible")
    return Found(
        f"for each job, at once, whether another session sees its data; {COMMITTERS} sessions commit",
        {"rows": len(rows), "early": early},
        note,
    )


def _commit_waits_for_standby(trial: Trial, look: Callable[[list[Record]], None]) -> bool:
    """False if it waited, and was told to wait no longer. A job that arrives meanwhile is early."""
    db = trial.scratch.connect(autocommit=False)
    db.execute("set synchronous_commit = on")
    db.commit()
    done = threading.Event()

    def commit() -> None:
        db.execute(COMMIT_ONE.encode(), [trial.scratch.task("g8")])
        db.commit()
        done.set()

    threading.Thread(target=commit, daemon=True).start()
    query = "select 1 from pg_stat_activity where pid = %s and wait_event = 'SyncRep'"
    since = time.monotonic()
    while not done.is_set() and time.monotonic() - since < 3.0:
        trial.worker.read_until(done.is_set, 0.1, look)
        waits = trial.db.execute(query, [db.info.backend_pid]).fetchall()
        if not waits:
            since = time.monotonic() if not done.is_set() else since
    if done.is_set():
        return True
    trial.db.execute("select pg_cancel_backend(%s)", [db.info.backend_pid])
    trial.until(done.is_set, "the commit to end")
    return False


COMMIT_ONE = """
with row as (insert into visible default values returning n)
insert into outbox (task, args) select %s, jsonb_build_object('n', n) from row"""


def at_least_once(trial: Trial) -> Found:
    for _ in range(5):
        if len(trial.worker.records) > len(trial.worker.ids):
            break
        load = kill_under_load(trial, "g9", 1)
        trial.relay(*NO_PURGE)
        trial.receive(load.committed)
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
