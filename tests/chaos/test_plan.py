"""The plan is the seed's alone, and leaves no kind of fault out; the stalls and the verdict are what they say."""

import dataclasses
import itertools
from collections import Counter

from tests.chaos.check import Figures
from tests.chaos.faults import FAULTS
from tests.chaos.plan import Step, plan
from tests.chaos.report import table, verdict
from tests.chaos.trial import Outcome, Struck, stalls

KINDS = {name: fault.kind for name, fault in FAULTS.items()}


def steps(seed: int, count: int) -> list[Step]:
    return list(itertools.islice(plan(seed, KINDS), count))


def test_a_seed_replays_its_plan_and_another_one_has_another() -> None:
    assert steps(7, 200) == steps(7, 200)
    assert steps(7, 200) != steps(8, 200)


def test_each_kind_strikes_once_before_any_strikes_twice() -> None:
    first = [step.first.kind for step in steps(3, 2 * len(KINDS))]
    assert sorted(first[: len(KINDS)]) == sorted(KINDS)
    assert sorted(first[len(KINDS) :]) == sorted(KINDS)


def test_what_only_one_kind_of_fault_finds_is_found_by_a_short_run() -> None:
    telling = {name for name, kind in KINDS.items() if kind.telling}
    assert "Postgres: a synchronous standby is silent" in telling
    for seed in range(20):
        assert {step.first.kind for step in steps(seed, len(telling))} == telling


def test_two_faults_of_one_part_never_strike_at_once() -> None:
    pairs = [step.kinds for step in steps(5, 500) if step.second]
    assert len(pairs) > 100
    assert all(KINDS[first].part != KINDS[second].part for first, second in pairs)


def test_faults_last_as_long_as_their_kind_says() -> None:
    for step in steps(11, 300):
        for strike in filter(None, (step.first, step.second)):
            shortest, longest = KINDS[strike.kind].seconds
            assert shortest <= strike.seconds <= longest


def test_every_part_and_every_kind_of_end_is_there() -> None:
    parts = {kind.part for kind in KINDS.values()}
    assert parts == {"relay", "purge", "broker", "postgres", "link to Postgres", "link to broker"}
    for words in ("kill -9", "STOP, CONT", "fast", "immediate", "postmaster", "backend", "reset", "black hole"):
        assert any(words in name for name in KINDS), words
    for words in ("200 ms", "flapping", "refused"):
        assert sum(words in name for name in KINDS) == 2, words


def test_a_stall_ends_with_the_first_new_row_after_the_fault() -> None:
    struck = [Struck(("a",), 1000, 2000), Struck(("b",), 5000, 6000)]
    assert stalls(struck, [1500, 3500, 5500, 6100]) == [(1.5, "a"), (0.1, "b")]


def test_a_stall_into_which_the_next_fault_falls_is_that_ones() -> None:
    struck = [Struck(("a",), 1000, 2000), Struck(("b",), 3000, 4000)]
    assert stalls(struck, [1500, 9000]) == [(5.0, "b")]


def outcome(figures: Figures, wrong_ends: tuple[str, ...] = (), healed: float = 2000) -> Outcome:
    return Outcome([Struck(("a",), 1000, healed)], figures, wrong_ends, Counter())


def test_what_is_wrong_stands_in_the_last_line_with_the_seed() -> None:
    figures = Figures(committed=5, first_appends=[2500])
    sound = outcome(figures)
    assert sound.problems == []
    assert verdict(sound, "SEED=7") == "ok; the same once more: SEED=7"
    assert "0.5 s" in table(sound)
    figures.count("lost", "mail 3")
    lost = outcome(figures, ("relay 1: exit 4: error: …",))
    assert verdict(lost, "SEED=7") == (
        "FAILED: 1 committed rows that are not in the topic (mail 3) · relay 1: exit 4: error: …; again: SEED=7"
    )


def test_a_repeat_that_is_no_replay_is_wrong_only_where_nothing_was_frozen() -> None:
    figures = Figures(committed=5, first_appends=[2500], overtaken=2)
    lenient = outcome(figures)
    assert lenient.problems == []
    strict = dataclasses.replace(lenient, strict=True)
    assert strict.problems == ["2 repeats that are no contiguous replay"]


def test_a_run_that_tried_nothing_or_stood_still_is_not_sound() -> None:
    assert outcome(Figures()).problems == ["no row was committed, so nothing was tried"]
    stood = outcome(Figures(committed=5, first_appends=[42_000]))
    assert stood.problems == ["a stall of 40.0 s after a"]
