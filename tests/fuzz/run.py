"""One target under libFuzzer: `python -m tests.fuzz.run TARGET CORPUS -max_total_time=60`, as `make fuzz` starts it.

To see one input again: `python -m tests.fuzz.run TARGET FILE`.
"""

import sys
import time

import atheris

with atheris.instrument_imports(include=["cdc_outbox", "http"]):
    from tests.fuzz.targets import TARGETS

SECONDS, SECONDS_A_BYTE = 0.5, 1e-4
"""Of the processor's time, instrumented: hundreds of times what an input needs."""


def main() -> None:
    name = sys.argv.pop(1)
    target = TARGETS[name]

    def one_input(data: bytes) -> None:
        began = time.thread_time()
        target(data)
        spent = time.thread_time() - began
        assert spent < SECONDS + SECONDS_A_BYTE * len(data), f"{spent:.1f} s for {len(data)} bytes"

    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
