"""Limits of one read: time and memory."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

from fuzzing.target import Broken

__all__ = ["LIMIT_S", "bounded", "guard_the_machine"]

LIMIT_S = 5
_MEMORY = 256 << 20  # bytes; one limit for every file, because all files are small
_OF_THE_MACHINE = 12 << 30
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def guard_the_machine() -> None:
    """Make a reader that asks for more memory raise MemoryError before other programs run out of memory."""
    resource.setrlimit(resource.RLIMIT_AS, (_OF_THE_MACHINE, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Check that the block keeps the limits of time and memory."""
    before = _resident("VmRSS")
    _CLEAR.write_text("5")  # resets the peak
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
    more = _resident("VmHWM") - before
    if more > _MEMORY:
        raise Broken(f"it took {more >> 20} MB of memory, the limit is {_MEMORY >> 20}")


def _late(*_: object) -> None:
    raise Broken(f"it took more than {LIMIT_S} s")


def _resident(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10
