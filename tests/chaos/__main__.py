"""`make chaos`: everything fails at random, and at the end every row is where it belongs. A seed replays the plan."""

import argparse
import random
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack

from tests.chaos.faults import FAULTS
from tests.chaos.plan import Step, Strike, plan
from tests.chaos.report import table, verdict
from tests.chaos.service import Tending
from tests.chaos.site import Site, site
from tests.chaos.trial import Struck, trial

CALM_SECONDS = 3.0
"""Before the first fault."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120, help="how long faults strike (120)")
    parser.add_argument("--seed", type=int, help="of an earlier run; else a new one")
    parser.add_argument("--pg", type=int, default=18, choices=[15, 16, 17, 18])
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    again = f"make chaos SECONDS={options.seconds:g} SEED={seed} PG={options.pg}"
    print(f"seed {seed}, {options.seconds:g} s", flush=True)
    try:
        with site(options.pg) as parts, Tending(parts.services):
            outcome = trial(parts, seed, lambda parts: ordeal(parts, seed, options.seconds))
    except Exception:
        traceback.print_exc()
        print(f"FAILED: the run itself; again: {again}")
        return 1
    print(table(outcome))
    print(verdict(outcome, again))
    return 1 if outcome.problems else 0


def ordeal(parts: Site, seed: int, seconds: float) -> Sequence[Struck]:
    clock = threading.Event()  # never set: to let a fault last is the one thing to wait for
    clock.wait(CALM_SECONDS)
    struck = []
    end = time.monotonic() + seconds
    for step in plan(seed, {name: fault.kind for name, fault in FAULTS.items()}):
        if time.monotonic() > end:
            break
        began = time.time()
        _strike(parts, step, clock)
        struck.append(Struck(step.kinds, began * 1000, time.time() * 1000))
        print(f"{time.strftime('%X')} {' + '.join(step.kinds)} ({struck[-1].healed / 1000 - began:.1f} s)", flush=True)
        clock.wait(step.pause)
    return struck


def _strike(parts: Site, step: Step, clock: threading.Event) -> None:
    def strike(one: Strike) -> None:
        faults.enter_context(FAULTS[one.kind].strike(parts, random.Random(one.seed)))

    with ExitStack() as faults:
        strike(step.first)
        clock.wait(step.first.seconds / 2)
        if step.second is not None:
            strike(step.second)
            clock.wait(step.second.seconds)
        clock.wait(step.first.seconds / 2)


if __name__ == "__main__":
    sys.exit(main())
