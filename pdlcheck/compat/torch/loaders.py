"""A pass of a DataLoader: its start, its seed, and the samples of its batches."""

from __future__ import annotations

from types import FrameType
from typing import Any, Final

from pdlcheck.compat.private import name, take, uses

__all__ = ["NEXT_SAMPLES", "Pass", "seed_of_workers", "seeds_no_worker"]

Pass: Any = take(
    "torch.utils.data.dataloader._BaseDataLoaderIter",
    "draws of a seed for the workers of a DataLoader",
    lost="check_random_streams reports the seed that a DataLoader without workers draws and drops",
)
NEXT_SAMPLES: Final = name(
    "torch.utils.data.dataloader._BaseDataLoaderIter._next_index",
    "the samples of each batch of a DataLoader",
    lost="check_resume does not tell other samples from other values of the same samples",
)
_STARTS = Pass.__init__.__code__


@uses(
    "torch.utils.data.dataloader._BaseDataLoaderIter._num_workers",
    lost="check_random_streams reports the seed that a DataLoader without workers draws and drops",
)
def seeds_no_worker(frame: FrameType) -> bool:
    """Return whether a frame starts a DataLoader's pass without workers, whose drawn seed has no effect."""
    return frame.f_code is _STARTS and frame.f_locals["self"]._num_workers == 0


@uses(
    "torch.utils.data.dataloader._BaseDataLoaderIter._base_seed",
    lost="check_resume does not name the seed from which the workers of a DataLoader draw",
)
def seed_of_workers(batches: Any) -> int | None:
    """Return the seed from which the workers of a DataLoader's pass draw; None if it has no workers."""
    return getattr(batches, "_base_seed", None) if getattr(batches, "_num_workers", 0) else None
