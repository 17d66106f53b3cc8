"""One process, measured from outside: time, CPU, memory."""

import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fix_command import OURS

SAMPLE_MS = 20
LONGEST_SECONDS = 900.0
_TICK = 1 / os.sysconf("SC_CLK_TCK")


class RunFailed(Exception):
    """A process that was to be measured ended with an error."""


@dataclass(frozen=True, slots=True)
class Usage:
    """`…_streaming_…` counts from the moment the process said that it streams; the rest from its start; all to its
    exit."""

    seconds: float
    streaming_seconds: float
    cpu_seconds: float
    streaming_cpu_seconds: float
    peak_rss_bytes: int
    rss_growth_bytes: int
    """The peak above what it held when it began to stream."""


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(OURS)}


def cpu_seconds(pid: int) -> float:
    """User and system time of all its threads so far (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK


def peak_rss_bytes(pid: int) -> int:
    """Zero of a process that has ended. Not ru_maxrss: that one begins with what the parent held (measured)."""
    return _memory(pid, "VmHWM")


def _memory(pid: int, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def measure(args: Sequence[object], streams: bytes) -> Usage:
    """Run `args` to the end; `streams` stands in its stderr once it streams. Raises RunFailed."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [str(arg) for arg in args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stderr is not None
    pid, stderr, said = process.pid, process.stderr.fileno(), b""
    streaming_since, cpu_before, rss_before, peak = 0.0, 0.0, 0, 0
    poller = select.poll()
    poller.register(stderr, select.POLLIN)
    poller.register(exited := os.pidfd_open(pid), select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poller.poll(SAMPLE_MS)}
        now = time.perf_counter()
        peak = max(peak, peak_rss_bytes(pid))
        if stderr in ready:
            said += (chunk := os.read(stderr, 1 << 16))
            if not chunk:
                poller.unregister(stderr)
            elif not streaming_since and streams in said:
                streaming_since, cpu_before, rss_before = now, cpu_seconds(pid), _memory(pid, "VmRSS")
        if exited in ready:
            break
        if now - started > LONGEST_SECONDS:
            process.send_signal(signal.SIGKILL)
    _, status, spent = os.wait4(pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    os.close(exited)
    with process.stderr as rest:
        said += rest.read()
    if process.returncode or streams not in said:
        tail = said.decode(errors="replace").splitlines()[-3:]
        raise RunFailed(f"{Path(str(args[0])).name}: exit {process.returncode}: {' / '.join(tail)}")
    cpu = spent.ru_utime + spent.ru_stime
    return Usage(now - started, now - streaming_since, cpu, cpu - cpu_before, peak, peak - rss_before)
