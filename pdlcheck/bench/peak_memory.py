"""The largest amount of memory that a block holds at once, on the host and on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["PeakMemory", "peak_memory"]

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class PeakMemory:
    """Bytes; None where nothing measures them.

    Args:
        host_bytes: resident memory of the process at its largest.
        device_bytes: what torch allocated at most, above what it held before.
    """

    host_bytes: int | None = None
    device_bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[PeakMemory]:
    """Measure a block; the numbers are there when it has ended."""
    peak = PeakMemory()
    counts = _reset_host()
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    yield peak
    if counts:
        peak.host_bytes = _host_peak()
    if device.type == "cuda":
        peak.device_bytes = torch.cuda.max_memory_allocated(device) - before


def _reset_host() -> bool:
    try:
        _CLEAR_REFS.write_text("5")  # the peak begins anew
    except OSError:
        return False
    return True


def _host_peak() -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")]
    return found[0] if found else None
