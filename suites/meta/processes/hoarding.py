"""A function that takes all the memory its process may have; its source also goes into generated test files."""

from __future__ import annotations

import resource
from pathlib import Path


def limit_memory(more: int) -> None:
    """Limit this process to ``more`` bytes above its current memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, resource.RLIM_INFINITY))


def hoard() -> None:
    """Allocate memory, in smaller and smaller pieces, until there is none."""
    kept = []
    for nbytes in (2**22, 2**16, 2**10):
        try:
            while True:
                kept.append(bytearray(nbytes))
        except MemoryError:
            if nbytes == 2**10:
                raise
