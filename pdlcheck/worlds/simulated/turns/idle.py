"""Ranks that have nothing to do: starting threads and making groups takes longer than most programs run on them.

They serve the next world of as many ranks, and only as long as nothing in them tells that another one came before.
"""

from __future__ import annotations

import os

from pdlcheck.worlds.simulated.network.network import Network

__all__ = ["keep", "take"]

_MOST = 4  # world sizes at a time

_idle: dict[int, Network] = {}  # by world size; the one used last comes last


def take(world_size: int) -> Network | None:
    """A network of as many ranks that nobody uses."""
    return _idle.pop(world_size, None)


def keep(network: Network) -> None:
    """Hold a network that is no longer used, or end its threads."""
    if not network.rest():
        network.scheduler.close()
        return
    _idle[len(network.scheduler.ranks)] = network
    while len(_idle) > _MOST:
        _idle.pop(next(iter(_idle))).scheduler.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # a child has none of the threads
