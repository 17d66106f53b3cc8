"""A set-up without a process of its own: most tests here are about what is said of it afterwards."""

import pytest

from tests.slot_rig import SlotRig
from tests.watched.rig import set_up


@pytest.fixture
def ready(fresh: SlotRig) -> SlotRig:
    """On the session's servers, after what `init-slot` does."""
    set_up(fresh)
    return fresh
