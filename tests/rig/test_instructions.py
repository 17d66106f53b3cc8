"""A relay that became slower is found by counting instructions, which a busy machine does not change."""

import os

import pytest

from benchmarks.instructions import MARGIN, available, count, recorded, this_python


@pytest.mark.skipif(not available() and not os.environ.get("CI"), reason="valgrind is not installed")
@pytest.mark.skipif(recorded().python != this_python(), reason=f"recorded with Python {recorded().python}")
def test_a_row_costs_no_more_instructions_than_were_recorded() -> None:
    """After a change that is meant: `python -m benchmarks.instructions --record`."""
    counted = count()
    for shape, ratio in recorded().ratios.items():
        assert counted.ratios[shape] <= ratio * (1 + MARGIN), f"{shape} rows a transaction"
