"""Device meshes that are each rank's own, where torch remembers what it has planned for one."""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from pdlcheck.compat.patches import Patch
from pdlcheck.worlds.simulated.turns.scheduler import current_rank

__all__ = ["PATCHES"]


def _own(make: Any) -> Any:
    """Return an ``__init__`` by which no two simulated ranks have equal meshes.

    torch remembers, for a mesh and placements, how DTensors get from one to the other, with the sizes that the rank's
    own shards have; a process remembers its own. A mesh tells threads apart by a number which torch sets for its own
    ranks in threads.
    """

    @wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        rank = current_rank()
        if rank is not None:
            self._thread_id = rank.rank

    return made


PATCHES = (Patch(DeviceMesh, "__init__", _own, "torch keeps its plans by mesh, and those of two ranks differ"),)
