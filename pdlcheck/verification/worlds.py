"""Which worlds this machine has: each of them is tried."""

from __future__ import annotations

import time

import torch.distributed as dist

from pdlcheck.errors import WorldUnavailable
from pdlcheck.report.records import WorldTrial
from pdlcheck.worlds import get_world

__all__ = ["try_world"]


def try_world(name: str) -> WorldTrial:
    """Run two ranks that say who they are."""
    start = time.perf_counter()
    why, cure = "", ""
    try:
        world = get_world(name)
        try:
            found = world.run(_who, world_size=2)
        finally:
            world.close()
        if found != [(0, 2), (1, 2)]:
            why = f"two ranks said that they are {found}"
    except WorldUnavailable as missing:
        why, cure = str(missing), missing.fields.get("cure", "")
    except Exception as error:  # whatever it is, the world does not work here
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    return WorldTrial(name, not why, time.perf_counter() - start, why, cure)


def _who() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()
