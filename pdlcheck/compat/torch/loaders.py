"""The start of a pass of a DataLoader."""

from __future__ import annotations

from types import FrameType
from typing import Any

from pdlcheck.compat.private import take, uses

__all__ = ["seeds_no_worker"]

_Pass: Any = take(
    "torch.utils.data.dataloader._BaseDataLoaderIter",
    "draws of a seed for the workers of a DataLoader",
    lost="check_random_streams reports the seed that a DataLoader without workers draws and drops",
)
_STARTS = _Pass.__init__.__code__


@uses(
    "torch.utils.data.dataloader._BaseDataLoaderIter._num_workers",
    lost="check_random_streams reports the seed that a DataLoader without workers draws and drops",
)
def seeds_no_worker(frame: FrameType) -> bool:
    """Return whether a frame starts a DataLoader's pass without workers, whose drawn seed has no effect."""
    return frame.f_code is _STARTS and frame.f_locals["self"]._num_workers == 0
