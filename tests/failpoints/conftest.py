"""FAILPOINT_ROUNDS: how often each place is tried. The table of them all stands at the end."""

import os
from collections import Counter

import pytest

ROUNDS = int(os.environ.get("FAILPOINT_ROUNDS", "1"))
KILLS = pytest.StashKey[Counter[str]]()


@pytest.fixture
def rounds() -> range:
    return range(ROUNDS)


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> Counter[str]:
    """Place -> processes that died there, and whose rows were all found afterwards."""
    return request.config.stash.setdefault(KILLS, Counter())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    kills = config.stash.get(KILLS, None)
    if kills and ROUNDS > 1:
        terminalreporter.section("kill -9 at each place")
        for place, count in kills.items():
            terminalreporter.write_line(f"{count:3}  {place}")
        terminalreporter.write_line(f"{kills.total():3}  at {len(kills)} places")
