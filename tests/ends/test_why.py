"""`make why`: the wrong ways go wrong, and the right one does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.why import WAYS
from tests.ends.programs import ROOT, run


def table(printed: str) -> dict[str, list[int]]:
    """Title -> orders, jobs, ran early, for no order, without receipt, receipts twice."""
    found = {}
    for title, _ in WAYS.values():
        (line,) = (line for line in printed.splitlines() if line.startswith(f"{title}  "))
        found[title] = [int(figure.replace(",", "")) for figure in line.removeprefix(title).split()]
    return found


@pytest.mark.slow
def test_each_wrong_way_fails_and_the_right_one_does_not(tmp_path: Path) -> None:
    printed = run(tmp_path / "log", "-m", "examples.why", seconds=180)
    in_transaction, with_retries, after_commit, outbox = table(printed).values()
    for orders, jobs, *_ in (in_transaction, with_retries, after_commit, outbox):
        assert orders > 500
        assert jobs > 500
    _, _, early, for_nothing, lost, _ = in_transaction
    assert early > 0
    assert for_nothing > 0
    assert lost > 0
    _, _, _, for_nothing, lost, _ = with_retries
    assert for_nothing > 0
    assert lost > 0
    _, _, early, for_nothing, lost, _ = after_commit
    assert (early, for_nothing) == (0, 0)
    assert lost > 0
    orders, jobs, *wrong = outbox
    assert wrong == [0, 0, 0, 0]
    assert jobs >= orders


def test_it_is_one_command() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "\nwhy: .venv/demo.stamp\n\t@$(BIN)/python -m examples.why\n" in makefile
