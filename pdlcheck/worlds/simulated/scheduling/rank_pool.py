"""Idle ranks, which serve the next world of their size.

Starting threads and making groups takes longer than most programs run. Idle ranks serve another world only if nothing
in them shows that there was one before.
"""

from __future__ import annotations

import os

from pdlcheck.worlds.simulated.network.network import Network

__all__ = ["keep", "take"]

_MOST = 4  # networks, one for each world size

_idle: dict[int, Network] = {}  # by world size; the most recently used is last


def take(world_size: int) -> Network | None:
    """Return an idle network of this size, which then is no longer idle; None if there is none."""
    return _idle.pop(world_size, None)


def keep(network: Network) -> None:
    """Keep a network that is no longer used, or end its threads if it is not as new."""
    if not network.rest():
        network.scheduler.close()
        return
    _idle[len(network.scheduler.ranks)] = network
    while len(_idle) > _MOST:
        _idle.pop(next(iter(_idle))).scheduler.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # a child has none of the threads
