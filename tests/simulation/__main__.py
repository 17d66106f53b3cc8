"""python -m tests.simulation [N [FIRST_SEED]]: so many schedules, on all cores. Prints the seed of each that failed.

`python -m tests.simulation 1 SEED` plays one again, and shows where the relay was.
"""

import logging
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat

from tests.simulation.world import World

CHUNK = 500


def failures(first: int, end: int) -> list[tuple[int, str]]:
    """(seed, what went wrong) of the schedules from `first` to before `end`."""
    logging.disable(logging.CRITICAL)
    found = []
    for seed in range(first, min(first + CHUNK, end)):
        try:
            World(seed).run()
        except Exception as error:
            found.append((seed, "".join(traceback.format_exception(error))))
    return found


def main(count: int, first: int) -> int:
    began = time.monotonic()
    failed = 0
    with ProcessPoolExecutor() as pool:
        for found in pool.map(failures, range(first, first + count, CHUNK), repeat(first + count)):
            for seed, trace in found:
                failed += 1
                print(f"seed {seed}: {trace.strip().splitlines()[-1]}", flush=True)
                if count == 1:
                    print(trace)
    print(f"{count} schedules, seeds {first} to {first + count - 1}: {failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    sys.exit(main(*(numbers + [100_000, 1][len(numbers) :])))
