"""Device meshes that differ between ranks, so that torch does not use one rank's plans on another."""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from pdlcheck.compat.patches import Patch
from pdlcheck.worlds.simulated.scheduling.scheduler import current_rank

__all__ = ["PATCHES"]


def _own(make: Any) -> Any:
    """Return an ``__init__`` that makes the meshes of any two simulated ranks unequal.

    For a mesh and placements, torch stores how to redistribute a DTensor. Such a plan contains the sizes of the rank's
    own shards. Each process stores its own plans. A mesh also has a number for its thread, which torch sets for its
    own ranks in threads; that number makes the meshes unequal.
    """

    @wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        rank = current_rank()
        if rank is not None:
            self._thread_id = rank.rank

    return made


PATCHES = (Patch(DeviceMesh, "__init__", _own, "torch keeps its plans by mesh, and those of two ranks differ"),)
