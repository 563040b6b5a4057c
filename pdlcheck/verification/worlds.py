"""The worlds that work on this machine, found by a trial of each."""

from __future__ import annotations

import time

import torch.distributed as dist

from pdlcheck.errors import WorldTooSmall, WorldUnavailable
from pdlcheck.report.records import WorldTrial
from pdlcheck.worlds import get_world

__all__ = ["try_world"]


def try_world(name: str) -> WorldTrial:
    """Run two ranks that return their rank and world size; run only one if the world has one device."""
    start = time.perf_counter()
    why, cure, ranks = "", "", 2
    try:
        world = get_world(name)
        try:
            found = world.run(_who, world_size=ranks)
        except WorldTooSmall:
            ranks = 1
            found = world.run(_who, world_size=ranks)
        finally:
            world.close()
        if found != [(rank, ranks) for rank in range(ranks)]:
            why = f"{ranks} ranks said that they are {found}"
    except WorldUnavailable as missing:
        why, cure = str(missing), missing.fields.get("cure", "")
    except Exception as error:  # any error means that the world does not work here
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    return WorldTrial(name, not why, time.perf_counter() - start, why, cure, ranks)


def _who() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()
