"""All fuzz targets."""

from __future__ import annotations

from fuzzing import checkpoints, edges, exchange
from fuzzing.target import NAMES, Target

__all__ = ["TARGETS"]

TARGETS: dict[str, Target] = {
    target.name: target for target in (*edges.TARGETS, *checkpoints.TARGETS, *exchange.TARGETS)
}
assert [*TARGETS] == NAMES
