"""Device meshes that are each rank's own, where torch remembers what it has planned for one."""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from pdlcheck.worlds.simulated.turns.scheduler import current_rank

__all__ = ["own_meshes"]


def own_meshes() -> None:
    """From now on no two simulated ranks have equal meshes.

    torch remembers, for a mesh and placements, how DTensors get from one to the other, with the sizes that the rank's
    own shards have; a process remembers its own. A mesh tells threads apart by a number which torch sets for its own
    ranks in threads.
    """
    mesh: Any = DeviceMesh
    make = mesh.__init__
    if getattr(make, "__module__", "") == __name__:
        return

    @wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        rank = current_rank()
        if rank is not None:
            self._thread_id = rank.rank

    made.__module__ = __name__
    mesh.__init__ = made
