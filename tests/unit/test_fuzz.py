"""The targets of `make fuzz`, a little: garbage and damaged golden bytes give what they may give and nothing else, and
cost no more than their length."""

import time
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.corpus import SEEDS
from tests.fuzz.targets import TARGETS, join, message, stream

every_target = pytest.mark.parametrize("target", TARGETS)


@every_target
def test_what_fuzzing_begins_with_keeps_every_promise(target: str) -> None:
    assert SEEDS[target]
    for seed in SEEDS[target]:
        TARGETS[target](seed)


@every_target
@given(data=st.binary(max_size=300))
def test_garbage_breaks_no_promise(target: str, data: bytes) -> None:
    TARGETS[target](data)


@every_target
@settings(max_examples=300)
@given(data=st.data())
def test_damage_breaks_no_promise(target: str, data: st.DataObject) -> None:
    damaged = bytearray(data.draw(st.sampled_from(SEEDS[target])))
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(0, len(damaged)))
        match data.draw(st.sampled_from(["change", "cut", "insert"])):
            case "change":
                damaged[place : place + 1] = data.draw(st.binary(min_size=1, max_size=4))
            case "cut":
                del damaged[place : place + data.draw(st.integers(1, 40))]
            case "insert":
                damaged[place:place] = data.draw(st.binary(max_size=8))
    TARGETS[target](bytes(damaged))


_FRAME = b"w" + bytes(24)
_LARGE = 200_000
# Each as long as it is told to be, of what a decoder has most to do with.
LARGEST: dict[str, Callable[[int], bytes]] = {
    "NULLs": lambda size: b"\xff\xff" + _FRAME + b"I" + bytes(4) + b"N\xff\xff" + b"n" * min(size, 0xFFFF),
    "empty texts": lambda size: (
        (size // 5).to_bytes(2, "big")
        + _FRAME
        + b"I"
        + bytes(4)
        + b"N"
        + (size // 5).to_bytes(2, "big")
        + b"t\0\0\0\0" * (size // 5)
    ),
    "one text": lambda size: b"\0\1" + _FRAME + b"I" + bytes(4) + b"N\0\1t" + size.to_bytes(4, "big") + b"x" * size,
    "columns": lambda size: (
        b"\0\0" + _FRAME + b"R" + bytes(4) + b"s\0t\0d\xff\xff" + (b"\1a\0" + bytes(8)) * (size // 11)
    ),
    "a name without an end": lambda size: b"\0\0" + _FRAME + b"Y" + bytes(4) + b"x" * size,
    "tables": lambda size: b"\0\0" + _FRAME + b"T" + (size // 4).to_bytes(4, "big") + b"\0" + bytes(size // 4 * 4),
    "zeros": lambda size: bytes(size),
}


@pytest.mark.parametrize("kind", LARGEST)
def test_time_and_memory_grow_with_the_length_of_a_message_and_no_faster(kind: str) -> None:
    def cost(size: int) -> tuple[float, int]:
        data = LARGEST[kind](size)
        spent = []
        for _ in range(3):
            began = time.process_time()
            message(data)
            spent.append(time.process_time() - began)
        tracemalloc.start()
        message(data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return min(spent), peak

    small, large = cost(_LARGE // 10), cost(_LARGE)
    assert large[0] < 30 * small[0] + 0.02
    assert large[1] < 100 * _LARGE


def test_a_stream_of_garbage_costs_no_more_than_its_length() -> None:
    began = time.process_time()
    stream(join([b"w" + bytes(24) + b"x" * 1000] * 60))
    stream(bytes(1_000_000))
    assert time.process_time() - began < 1
