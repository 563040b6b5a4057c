"""Devices that this torch was built without: nobody will ever draw from their random streams.

``torch.manual_seed`` seeds the streams of every kind of device. For one that has not been used yet it notes the call,
with a stack trace: three of them in the CPU build, each of 30 frames in a test, take longer than the test's own sums.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["leave_absent_devices_alone"]


def leave_absent_devices_alone() -> None:
    """From now on, seeding notes nothing for such devices; what torch documents of it stays as it is."""
    kinds: tuple[Any, ...] = (torch.cuda, torch.mtia, torch.xpu)
    for kind in kinds:
        if hasattr(kind, "manual_seed_all") and not kind._is_compiled():
            kind.manual_seed_all = _ignore


def _ignore(seed: int) -> None:
    """As torch's own, for a device that is not there."""
    int(seed)
