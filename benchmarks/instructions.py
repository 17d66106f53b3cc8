"""`python -m benchmarks.instructions`: instructions a row in the decode-and-produce loop, which no noise touches.

Counted by callgrind in one process: a few rows, so that everything is loaded and made, then the same with more. An
interpreter is built in many ways: what is kept in the repository and compared is the ratio to a yardstick, a loop that
never changes, counted beside it. `--record` keeps it.
"""

import argparse
import json
import os
import platform
import re
import struct
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import which

from benchmarks.replay import replay

RECORD = Path(__file__).with_name("instructions.json")
MARGIN = 0.1
"""What a change may cost before a test says so; and how far two builds of one Python may lie apart."""
ROWS_PER_TRANSACTION = (100, 1)
FEW, MANY = 1_000, 5_000
_MARK = "getppid"
"""A function that nobody calls: callgrind ends a count when it is entered."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Instructions a row, by rows a transaction; of one round of the yardstick; and by what."""

    instructions: dict[str, int]
    yardstick: int
    python: str

    @property
    def ratios(self) -> dict[str, float]:
        return {shape: round(count / self.yardstick, 3) for shape, count in self.instructions.items()}


def available() -> bool:
    return which("valgrind") is not None


def this_python() -> str:
    """To the last figure: Debian's 3.11.2 takes 12 % more, measured against the yardstick, than a 3.11.7 built here."""
    return platform.python_version()


def recorded() -> Counted:
    return Counted(**json.loads(RECORD.read_text()))


def count() -> Counted:
    """Takes about 15 s of CPU."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "callgrind"
        # Each thread apart: librdkafka's own count the time, not the rows.
        tool = ["valgrind", "--tool=callgrind", "--separate-threads=yes", f"--dump-before={_MARK}"]
        subprocess.run(
            [*tool, f"--callgrind-out-file={output}", sys.executable, "-m", "benchmarks.instructions", "--work"],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "PYTHONHASHSEED": "0"},
            capture_output=True,
            check=True,
        )
        parts = [_total(Path(f"{output}.{part}-01")) for part in range(2, 4 + 2 * len(ROWS_PER_TRANSACTION))]
    few, many = parts[0::2], parts[1::2]
    yardstick, *loops = [(more - less) // (MANY - FEW) for less, more in zip(few, many, strict=True)]
    return Counted(dict(zip(map(str, ROWS_PER_TRANSACTION), loops, strict=True)), yardstick, this_python())


def _total(part: Path) -> int:
    return int(re.findall(r"^totals: (\d+)", part.read_text(), re.MULTILINE)[0])


def _work() -> None:
    """What is counted: each piece with few and with many rounds, a mark before and after."""
    os.getppid()
    _yardstick(FEW)
    os.getppid()
    _yardstick(MANY)
    os.getppid()
    for shape in ROWS_PER_TRANSACTION:
        replay(FEW, shape)
        os.getppid()
        replay(MANY, shape)
        os.getppid()
    os._exit(0)  # nothing is to be delivered


def _yardstick(rounds: int) -> None:
    """What the loop is made of (bytes, struct, lists), in a form that is not to change."""
    message = b"t\0\0\0\x08eight by" * 6
    length = struct.Struct(">I")
    for _ in range(rounds):
        position = 0
        columns: list[bytes] = []
        while position < len(message):
            begin = position + 5
            position = begin + length.unpack_from(message, position + 1)[0]
            columns.append(message[begin:position])
        dict(zip("abcdef", columns, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=__doc__)
    parser.add_argument("--record", action="store_true", help=f"keep it in {RECORD.name}")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        _work()
    if not available():
        print("error: valgrind is not installed", file=sys.stderr)
        return 2
    counted = count()
    for shape, ratio in counted.ratios.items():
        line = f"{shape} rows a transaction: {counted.instructions[shape]:,} instructions a row, {ratio} yardsticks"
        if RECORD.exists() and recorded().python == counted.python:
            line += f", {ratio / recorded().ratios[shape] - 1:+.1%} against the record"
        print(line)
    if options.record:
        RECORD.write_text(json.dumps(asdict(counted), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
