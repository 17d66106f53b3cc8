"""What a person reads at the end: a table, and one last line with the verdict and the seed."""

from collections.abc import Iterator

from tests.chaos.check import WRONG
from tests.chaos.trial import Outcome


def table(outcome: Outcome) -> str:
    rows = list(_rows(outcome))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value:>10}" if value else name for name, value in rows)


def verdict(outcome: Outcome, again: str) -> str:
    """`again`: how to have the same run once more."""
    if problems := outcome.problems:
        return f"FAILED: {' · '.join(problems)}; again: {again}"
    return f"ok; the same once more: {again}"


def _rows(outcome: Outcome) -> Iterator[tuple[str, str]]:
    figures = outcome.figures
    yield "Faults", ""
    for kind, count in sorted(outcome.kinds.items()):
        yield f"  {kind}", f"{count:,}"
    yield "  all of them", f"{outcome.kinds.total():,}"
    yield "Processes of ours that ended, and were started again", ""
    for end, count in sorted(outcome.ends.items()):
        yield f"  {end}", f"{count:,}"
    yield "Rows", ""
    yield "  committed", f"{figures.committed:,}"
    yield "  in transactions", f"{figures.transactions:,}"
    yield "  of which the writer heard nothing", f"{figures.resolved:,}"
    yield "  rolled back", f"{figures.rolled_back:,}"
    yield "  delivered (records in the topic)", f"{figures.delivered:,}"
    yield "  repeated", f"{figures.repeated:,}"
    yield "  repeated out of a frozen party's buffer", f"{figures.overtaken:,}"
    yield "  purged", f"{figures.purged:,}"
    yield "Wrong", ""
    for what in WRONG:
        yield f"  {what}", f"{figures.wrong[what]:,}"
    yield "  processes that ended by themselves", f"{len(outcome.wrong_ends):,}"
    seconds, kind = outcome.stall
    yield "Longest stall after a fault", f"{seconds:.1f} s"
    yield f"  after {kind}", ""
