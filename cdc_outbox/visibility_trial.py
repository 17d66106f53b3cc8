"""G8, tried: is a job's data visible to another session at the moment when the job arrives?

Many sessions commit at once, which makes the moment between a commit's flush and its visibility as long as a client
can make it. Where the server has a synchronous standby, a commit waits for it in just that moment: if the standby does
not answer, it waits for as long as one looks.
"""

from __future__ import annotations

from collections.abc import Callable

from cdc_outbox.scratch_worker import Record
from cdc_outbox.trial import SOON_PURGED, Found, InBackground, Trial, must

COMMITTERS, COMMITS, COMMIT_SECONDS = 12, 1000, 4.0
STANDBY_SECONDS = 3.0
"""A commit that has waited this long is told to wait no longer."""

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

COMMIT_ONE = """
with row as (insert into visible default values returning n)
insert into outbox (task, args) select %s, jsonb_build_object('n', n) from row"""


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
    note, level = (
        "not tried, for want of a synchronous standby: a commit that waits; load alone seldom finds a fault",
        "on",
    )
    if names:
        answers = _commit_waits_for_standby(trial, look)
        level = "remote_apply" if answers else "local"
        note = "the synchronous standby answers" if answers else "a commit waited for the standby, and the job with it"
        must(early == 0, f"{early} jobs reached Kafka before their data was visible (a commit waited for the standby)")
    loop = COMMIT_LOOP % (COMMIT_SECONDS, COMMITS, task)
    sessions = [trial.scratch.connect() for _ in range(COMMITTERS)]
    for db in sessions:
        db.execute(f"set synchronous_commit = {level}".encode())
    committers = [InBackground(lambda db=db: db.execute(loop.encode())) for db in sessions]  # type: ignore[misc]
    trial.read_until(lambda: all(committer.done for committer in committers), "the committers", look)
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

    def commit() -> None:
        db.execute(COMMIT_ONE.encode(), [trial.scratch.task("g8")])
        db.commit()

    committer = InBackground(commit)
    if trial.worker.read_until(lambda: committer.done, STANDBY_SECONDS, look):
        return True
    waits = trial.db.execute("select wait_event from pg_stat_activity where pid = %s", [db.info.backend_pid]).fetchall()
    must(waits == [("SyncRep",)], f"a commit did not end within {STANDBY_SECONDS:.0f} s")
    trial.db.execute("select pg_cancel_backend(%s)", [db.info.backend_pid])
    trial.until(lambda: committer.done, "the commit to end")
    return False
