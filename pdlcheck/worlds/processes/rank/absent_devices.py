"""The seeding of devices that this torch was built without; no code can draw from their random streams.

``torch.manual_seed`` seeds the streams of every kind of device. For a device that is not in use yet, it records the
call with a stack trace. The CPU build records three of them, each of 30 frames in a test. They take longer than the
test's own computations.
"""

from __future__ import annotations

from typing import Any

import torch

from pdlcheck.compat.torch.devices import is_built

__all__ = ["leave_absent_devices_alone"]


def leave_absent_devices_alone() -> None:
    """Make seeding record nothing for absent devices; its documented behaviour stays as it is."""
    kinds: tuple[Any, ...] = (torch.cuda, torch.mtia, torch.xpu)
    for kind in kinds:
        if hasattr(kind, "manual_seed_all") and not is_built(kind):
            kind.manual_seed_all = _ignore


def _ignore(seed: int) -> None:
    """Accept the same seeds as torch's own function, and do nothing."""
    int(seed)
