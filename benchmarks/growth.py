"""What bends the line: the same drain with more of one thing at a time, each beside the walsender's own rate."""

from benchmarks.backlog import Shape
from benchmarks.drain import Drain, drain
from benchmarks.rig import Rig

BASE = "base: 100 rows a transaction, 10 tasks, 0.3 kB"


def shapes(rows: int) -> dict[str, Shape]:
    """By what grows, for a base case of `rows`; fewer rows where each is larger."""
    return {
        BASE: Shape(rows, 100),
        "1 row a transaction": Shape(rows // 2, 1),
        "10 rows a transaction": Shape(rows, 10),
        "1,000 rows a transaction": Shape(rows, 1_000),
        "1 task": Shape(rows, 100, tasks=1),
        "10,000 tasks": Shape(rows, 100, tasks=10_000),
        "2 kB more a row": Shape(rows // 4, 100, padding=2_000),
        "20 kB more a row": Shape(rows // 20, 100, padding=20_000),
        "90 % of the WAL is another table's": Shape(rows // 4, 100, neighbours=9),
    }


def growth(rig: Rig, rows: int, runs: int) -> dict[str, Drain]:
    return {name: drain(rig, shape, runs) for name, shape in shapes(rows).items()}
