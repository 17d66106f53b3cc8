"""Where the fixtures are: one file per concern, each with its options and markers."""

import pytest

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
