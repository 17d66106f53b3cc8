"""Where the fixtures are: one file per concern, each with its options and markers."""

import pytest
from hypothesis import settings

# A machine that is shared stalls for longer than the 200 ms that an example may take. What must be fast says so itself.
settings.register_profile("shared machine", parent=settings(), deadline=None)
settings.load_profile("shared machine")

pytest_plugins = [
    "tests.fix_command",
    "tests.fix_kafka",
    "tests.fix_postgres",
    "tests.fix_proxy",
    "tests.relay_rig",
    "tests.slot_rig",
]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than about ten seconds")
