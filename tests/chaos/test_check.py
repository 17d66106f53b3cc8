"""The checker finds what is planted, one fault at a time: a check that cannot fail proves nothing."""

import dataclasses

import pytest

from tests.chaos.check import WRONG, Arrival, Evidence, Figures, Purged, Sighting, check
from tests.chaos.truth import Attempt, Said

START = 1_000_000
"""Milliseconds at which the first row is committed; the n-th follows 10 n later and is in the topic 3 after that."""
ROWS = 20
LATE = 7
"""A transaction that began before the others and committed after them: its number is low, its place the last."""


def appended(n: int) -> int:
    return START + 10 * n + 3


def sound() -> Evidence:
    """One row a transaction in "mail", committed in the order of n; then "late"; one rolled back, one unresolved."""
    attempts = [Attempt(tx=n + 1, task="mail", kept=(range(n, n + 1),)) for n in range(ROWS)]
    attempts += [
        Attempt(tx=100, task="mail", kept=(range(ROWS, ROWS + 5),), said=Said.ROLLED_BACK),
        Attempt(tx=101, task="mail", kept=(range(ROWS + 5, ROWS + 6),), undone=(range(90, 95),), said=Said.NOTHING),
        Attempt(tx=102, task="late", kept=(range(LATE, LATE + 1),)),
    ]
    stored = {n + 1: 500 + n for n in range(ROWS)} | {101: 600, 102: 400}
    arrivals = [Arrival("mail", n, 0, appended(n), 1000 + n) for n in range(ROWS)]
    arrivals += [Arrival("mail", ROWS + 5, 0, appended(ROWS), 1000 + ROWS)]
    arrivals += [Arrival("late", LATE, 1, appended(ROWS + 1), 1000 + ROWS + 1)]
    purged = [Purged("mail", [n], appended(n) + 20.5) for n in (*range(ROWS), ROWS + 5)]
    purged += [Purged("late", [LATE], appended(ROWS + 1) + 20.0)]
    sightings = [sighting(n, confirmed=1000 + n, seen=500 + n) for n in range(ROWS)]
    sightings += [sighting(ROWS + 3, confirmed=1000 + ROWS + 2, seen=601)]
    return Evidence(attempts, stored, arrivals, purged, sightings, left=0)


def sighting(n: int, confirmed: int, seen: int) -> Sighting:
    """Made 1 ms before row n is in the topic: rows before it are confirmed, and it can be seen already."""
    snapshot = f"400:{seen + 1}:400" if seen < 601 else f"{seen + 1}:{seen + 1}:"
    return Sighting(appended(n) - 1.0, appended(n) - 0.5, confirmed, snapshot)


def found(evidence: Evidence) -> dict[str, int]:
    return {what: count for what, count in check(evidence).wrong.items() if count}


def with_arrivals(*arrivals: Arrival) -> Evidence:
    return dataclasses.replace(sound(), arrivals=arrivals)


ARRIVALS = tuple(sound().arrivals)
FIRST, SECOND, *REST = ARRIVALS


def test_a_sound_run_is_sound_and_is_counted() -> None:
    figures = check(sound())
    assert figures.problems == []
    assert (figures.committed, figures.transactions, figures.resolved) == (ROWS + 2, ROWS + 2, 1)
    assert (figures.rolled_back, figures.delivered, figures.repeated, figures.purged) == (10, ROWS + 2, 0, ROWS + 2)
    assert figures.first_appends == sorted(arrival.appended for arrival in ARRIVALS)


def test_a_contiguous_replay_is_a_repeat_and_nothing_worse() -> None:
    replay = [arrival._replace(appended=appended(ROWS + 5)) for arrival in ARRIVALS[5:]]
    figures = check(with_arrivals(*ARRIVALS, *replay))
    assert figures.problems == []
    assert (figures.repeated, figures.overtaken) == (len(replay), 0)


def test_a_straggler_among_repeats_is_told_apart() -> None:
    figures = check(with_arrivals(*ARRIVALS, FIRST, ARRIVALS[9], SECOND))
    assert figures.problems == []
    assert (figures.repeated, figures.overtaken) == (3, 1)


def test_a_lost_row_is_found() -> None:
    assert found(with_arrivals(FIRST, *REST)) == {"lost": 1, "purged before delivered": 1}


@pytest.mark.parametrize("n", [ROWS, ROWS + 4, 92, 5000, -1])
def test_a_row_that_was_rolled_back_or_never_written_is_a_phantom(n: int) -> None:
    assert found(with_arrivals(*ARRIVALS, FIRST._replace(n=n))) == {"phantom": 1}


def test_a_record_of_an_unknown_task_is_a_phantom() -> None:
    assert found(with_arrivals(*ARRIVALS, FIRST._replace(task="nobody's"))) == {"phantom": 1}


def test_rows_of_a_commit_that_the_writer_never_heard_of_count_only_if_postgres_has_it() -> None:
    stored = {tx: xid for tx, xid in sound().stored.items() if tx != 101}
    assert found(dataclasses.replace(sound(), stored=stored)) == {"phantom": 1, "purged before delivered": 1}


def test_a_row_that_was_purged_a_millisecond_early_is_found() -> None:
    purged = [*sound().purged][1:]
    at = float(appended(0))
    assert found(dataclasses.replace(sound(), purged=[*purged, Purged("mail", [0], at)])) == {}
    assert found(dataclasses.replace(sound(), purged=[*purged, Purged("mail", [0], at - 1)])) == {
        "purged before delivered": 1
    }


def test_what_a_purge_by_id_does_to_a_late_commit_is_found() -> None:
    purged = [*sound().purged][:-1]
    early = Purged("late", [LATE], appended(ROWS + 1) - 2.0)
    assert found(dataclasses.replace(sound(), purged=[*purged, early])) == {"purged before delivered": 1}


def test_first_occurrences_out_of_commit_order_are_found() -> None:
    assert found(with_arrivals(SECOND, FIRST, *REST)) == {"out of order": 1}


def test_the_place_of_a_row_is_that_of_its_commit_and_not_of_its_number() -> None:
    attempts = [*sound().attempts]
    attempts[3], attempts[4] = attempts[4], attempts[3]
    assert found(dataclasses.replace(sound(), attempts=attempts)) == {"out of order": 1}


def test_a_record_in_a_second_partition_is_found() -> None:
    assert found(with_arrivals(*ARRIVALS[:-2], ARRIVALS[-2]._replace(partition=2), ARRIVALS[-1])) == {
        "in two partitions": 1
    }


def test_a_position_confirmed_before_its_row_was_there_is_found_even_if_it_went_back() -> None:
    sightings = [*sound().sightings]
    # The slot stood behind row 9 when row 6 was about to arrive; a crash of the server then took it back.
    sightings[6] = sightings[6]._replace(confirmed=1000 + 9)
    assert found(dataclasses.replace(sound(), sightings=sightings)) == {"confirmed before delivered": 3}


def test_a_transaction_that_arrived_before_it_could_be_seen_is_found() -> None:
    sightings = [*sound().sightings]
    sightings[6] = sighting(6, confirmed=1006, seen=503)  # rows 4 and 5 are in the topic, and not seen yet
    assert found(dataclasses.replace(sound(), sightings=sightings)) == {"relayed before visible": 1}


def test_a_prepared_transaction_that_is_still_running_cannot_be_seen() -> None:
    sightings = [*sound().sightings]
    last = sightings[-1]
    sightings[-1] = last._replace(snapshot="400:602:400,550")  # 400 is the xid of "late"
    assert found(dataclasses.replace(sound(), sightings=sightings)) == {"relayed before visible": 1}


def test_rows_that_nobody_purged_are_found() -> None:
    assert found(dataclasses.replace(sound(), left=4)) == {"never purged": 4}


def test_what_postgres_forgot_although_it_had_said_committed_is_found() -> None:
    stored = {tx: xid for tx, xid in sound().stored.items() if tx != 5}
    assert found(dataclasses.replace(sound(), stored=stored))["contradictions"] == 1


def test_every_kind_of_wrong_is_told_with_examples() -> None:
    figures = Figures()
    for what in WRONG:
        for number in range(5):
            figures.count(what, f"row {number}")
    assert len(figures.problems) == len(WRONG)
    assert all(problem.endswith("(row 0; row 1; row 2)") for problem in figures.problems)
