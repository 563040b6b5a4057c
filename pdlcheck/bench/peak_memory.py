"""The peak memory of a block, on the host and on a device."""

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
    """The peak in bytes; None if it is not measured.

    Args:
        host_bytes: the largest resident memory of the process.
        device_bytes: the largest amount that torch allocated, above the amount before the block.
    """

    host_bytes: int | None = None
    device_bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[PeakMemory]:
    """Measure a block; the numbers are available when the block has ended."""
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
        _CLEAR_REFS.write_text("5")  # resets the peak
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
