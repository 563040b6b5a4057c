"""Idle ranks, which serve the next world of their size.

Starting threads and making groups takes longer than most programs run. Idle ranks serve another world only if nothing
in them shows that there was one before.
"""

from __future__ import annotations

import os

from pdlcheck.worlds.simulated.cluster import Cluster

__all__ = ["keep", "take"]

_MOST = 4  # clusters, one for each world size

_idle: dict[int, Cluster] = {}  # by world size; the most recently used is last


def take(world_size: int) -> Cluster | None:
    """Return an idle cluster of this size, which then is no longer idle; None if there is none."""
    return _idle.pop(world_size, None)


def keep(cluster: Cluster) -> None:
    """Keep a cluster that is no longer used, or end its threads if it is not as new."""
    if not cluster.rest():
        cluster.scheduler.close()
        return
    _idle[len(cluster.scheduler.ranks)] = cluster
    while len(_idle) > _MOST:
        _idle.pop(next(iter(_idle))).scheduler.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # a child has none of the threads
