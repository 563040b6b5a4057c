"""Other work on the machine."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

__all__ = ["other_work"]


@contextlib.contextmanager
def other_work(processes: int) -> Iterator[None]:
    """Keep this number of processes busy while the block runs."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()
