"""The part of a logical tensor that a rank has: one split for each axis of ranks.

Offsets are not recorded. They follow from the sizes of the pieces when the traces of all ranks are read, so uneven
shards need no communication while a training runs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["BATCH_AXES", "MICRO_BATCH", "SAMPLES", "Split", "split_from_json", "split_to_json"]

BATCH_AXES = ("dp", "ddp", "fsdp", "data", "replicate", "dp_replicate", "dp_shard", "batch")  # they divide samples
MICRO_BATCH = "micro-batch"  # an axis of time: the micro-batches of a step, on one rank
SAMPLES = "samples"  # an axis whose positions a mapping gives


@dataclass(frozen=True)
class Split:
    """One axis of ranks, and what it does to a tensor.

    Args:
        axis: the name of the axis, such as ``tp``.
        at: the coordinate of this rank.
        of: the number of coordinates.
        how: ``shard``, ``batch`` (a shard of the samples, or a mean over them for a tensor without dimensions),
            ``sum`` or ``mean`` (each rank has a term).
        dim: the dimension that is split; None for a sum or a mean.
        positions: the positions along ``dim`` of what this rank has; None if parts follow one another by coordinate.
    """

    axis: str
    at: int
    of: int
    how: str
    dim: int | None = None
    positions: tuple[int, ...] | None = None


def split_to_json(split: Split) -> dict[str, Any]:
    """Return a split in the form of the header of a trace."""
    return {name: value for name, value in asdict(split).items() if value is not None}


def split_from_json(found: dict[str, Any]) -> Split:
    """Return the split of a header."""
    positions = found.get("positions")
    return Split(**{**found, "positions": None if positions is None else tuple(positions)})
