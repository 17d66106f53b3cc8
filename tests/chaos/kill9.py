"""`make kill9`: the relay alone is killed, again and again, at a random moment after its start, under load.

Every other time the moment counts from when it streams: on a slow machine the others come before that.
"""

import random
import sys
import threading
import time
from collections.abc import Sequence

from tests.chaos.command import options, play
from tests.chaos.site import Site
from tests.chaos.trial import Struck

AFTER_SECONDS = (0.02, 1.5)
BEFORE, AFTER = "relay: kill -9 before it streamed", "relay: kill -9 while it streamed"


def main() -> int:
    given = options("tests.chaos.kill9", __doc__, "kills", 100)
    again = f"make kill9 N={given.amount} SEED={given.seed} PG={given.pg}"
    return play(given, again, lambda parts: kills(parts, given.seed, given.amount), relays=1, strict=True)


def kills(parts: Site, seed: int, count: int) -> Sequence[Struck]:
    choice = random.Random(f"kills {seed}")
    clock = threading.Event()  # never set: it only keeps the time
    (relay,) = parts.relays
    struck = []
    for number in range(count):
        if number % 2:
            relay.running.wait_for_log("streaming ")
        clock.wait(choice.uniform(*AFTER_SECONDS))
        relay.running.kill9()
        killed = time.time() * 1000
        streamed = "streaming " in relay.running.stderr_text()
        struck.append(Struck((AFTER if streamed else BEFORE,), killed, killed))
        relay.tend()
    return struck


if __name__ == "__main__":
    sys.exit(main())
