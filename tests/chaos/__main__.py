"""`make chaos`: everything fails at random, and at the end every row is where it belongs. A seed replays the plan."""

import random
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

from tests.chaos.command import options, play
from tests.chaos.faults import FAULTS
from tests.chaos.plan import Step, Strike, plan
from tests.chaos.service import Tending
from tests.chaos.site import Site
from tests.chaos.trial import Struck

CALM_SECONDS = 3.0
"""Before the first fault."""


def main() -> int:
    given = options("tests.chaos", __doc__, "seconds", 120)
    again = f"make chaos SECONDS={given.amount} SEED={given.seed} PG={given.pg}"
    return play(given, again, lambda parts: ordeal(parts, given.seed, given.amount), relays=2, strict=False)


def ordeal(parts: Site, seed: int, seconds: float) -> Sequence[Struck]:
    clock = threading.Event()  # never set: to let a fault last is the one thing to wait for
    struck = []
    with Tending(parts.services):
        clock.wait(CALM_SECONDS)
        end = time.monotonic() + seconds
        for step in plan(seed, {name: fault.kind for name, fault in FAULTS.items()}):
            if time.monotonic() > end:
                break
            began = time.time()
            _strike(parts, step, clock)
            healed = time.time()
            struck.append(Struck(step.kinds, began * 1000, healed * 1000))
            print(f"{time.strftime('%X')} {' + '.join(step.kinds)} ({healed - began:.1f} s)", flush=True)
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
