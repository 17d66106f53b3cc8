"""What both commands share: the options, the run around an ordeal, and how it ends."""

import argparse
import random
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence

from cdc_outbox.errors import PreconditionError
from tests.chaos.report import table, verdict
from tests.chaos.site import Site, site
from tests.chaos.trial import Struck, trial
from tests.kafka_server import KafkaUnavailable


def options(prog: str, description: str | None, measure: str, default: int) -> argparse.Namespace:
    """`seed` is never None; `amount` is what `--MEASURE` says."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=description)
    parser.add_argument(f"--{measure}", dest="amount", type=int, default=default, help=f"how many ({default})")
    parser.add_argument("--seed", type=int, help="of an earlier run; else a new one")
    parser.add_argument("--pg", type=int, default=18, choices=[15, 16, 17, 18])
    given = parser.parse_args()
    if given.seed is None:
        given.seed = random.SystemRandom().randrange(1_000_000)
    return given


def play(
    given: argparse.Namespace,
    again: str,
    ordeal: Callable[[Site], Sequence[Struck]],
    *,
    relays: int,
    strict: bool,
) -> int:
    """The exit code: 0, or 1 with the reasons and `again` in the last line, or 2 where it cannot be tried.

    `strict`: nothing is ever frozen, so each repeat must be a contiguous replay from an earlier point.
    """
    print(f"seed {given.seed}", flush=True)
    try:
        with site(given.pg, relays) as parts:
            outcome = trial(parts, given.seed, ordeal, strict=strict)
    except (KafkaUnavailable, PreconditionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception:
        traceback.print_exc()
        print(f"FAILED: the run itself; again: {again}")
        return 1
    print(table(outcome))
    if outcome.problems:
        print(f"What each process logged is in {parts.logs}")
    else:
        shutil.rmtree(parts.logs)
    print(verdict(outcome, again))
    return 1 if outcome.problems else 0
