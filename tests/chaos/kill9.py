"""`make kill9`: the relay alone is killed, again and again, at a random moment after its start, under load."""

import argparse
import random
import sys
import threading
import time
import traceback
from collections.abc import Sequence

from tests.chaos.report import table, verdict
from tests.chaos.site import Site, site
from tests.chaos.trial import Struck, trial

AFTER_SECONDS = (0.02, 1.5)
BEFORE, AFTER = "relay: kill -9 before it streamed", "relay: kill -9 while it streamed"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.kill9", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="how many (100)")
    parser.add_argument("--seed", type=int, help="of an earlier run; else a new one")
    parser.add_argument("--pg", type=int, default=18, choices=[15, 16, 17, 18])
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    again = f"make kill9 N={options.kills} SEED={seed} PG={options.pg}"
    print(f"seed {seed}, {options.kills} kills", flush=True)
    try:
        with site(options.pg, relays=1) as parts:
            outcome = trial(parts, seed, lambda parts: kills(parts, seed, options.kills))
    except Exception:
        traceback.print_exc()
        print(f"FAILED: the run itself; again: {again}")
        return 1
    print(table(outcome))
    # Nothing was frozen, so every repeat is a replay from an earlier point.
    overtaken = outcome.figures.overtaken
    if overtaken:
        print(f"FAILED: {overtaken} repeats that are no contiguous replay; again: {again}")
        return 1
    print(verdict(outcome, again))
    return 1 if outcome.problems else 0


def kills(parts: Site, seed: int, count: int) -> Sequence[Struck]:
    choice = random.Random(f"kills {seed}")
    clock = threading.Event()  # never set: it only keeps the time
    (relay,) = parts.relays
    struck = []
    for _ in range(count):
        clock.wait(choice.uniform(*AFTER_SECONDS))
        relay.running.kill9()
        killed = time.time() * 1000
        streamed = "streaming " in relay.running.stderr_text()
        struck.append(Struck((AFTER if streamed else BEFORE,), killed, killed))
        relay.tend()
    return struck


if __name__ == "__main__":
    sys.exit(main())
