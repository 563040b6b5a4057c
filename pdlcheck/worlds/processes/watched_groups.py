"""What watched groups of every backend have in common.

Before a group is made all ranks meet at the controller: a group that some of them do not make, or make in another
order, can be reported. Collectives are numbered from 0 in each call.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from pdlcheck.errors import Unsupported
from pdlcheck.worlds.processes.announce import Announcer
from pdlcheck.worlds.watch import WatchedGroup, is_local, new_group

__all__ = ["begin_call", "being_made", "meet_in_new_group", "numbered"]

_SIMULATED = "sim"
being_made: list[tuple[str, tuple[int, ...]]] = []  # name and members of the groups under construction
_groups: weakref.WeakSet[WatchedGroup] = weakref.WeakSet()


def meet_in_new_group(announcer: Announcer) -> None:
    """From now on, all ranks, or the members alone, wait for one another at the controller before they make a group."""
    real_helper = getattr(c10d, "_new_process_group_helper", None)
    if real_helper is None:
        raise Unsupported(
            f"watched processes do not know torch {torch.__version__}: distributed_c10d lacks "
            "_new_process_group_helper; use ProcessWorld(watch=False), or a torch from the tested range"
        )

    def make(group_size: int, group_rank: int | None, ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        """In the place of torch's helper, which makes one group on one rank; returns what that returns."""
        backend, _, name = args[:3]  # the store between them
        if backend == _SIMULATED:  # a cluster that this rank simulates, all in its own process
            return real_helper(group_size, group_rank, ranks, *args, **kwargs)
        members = tuple(ranks) or tuple(range(group_size))
        being_made.append((str(name), members))
        try:
            default = c10d._world.default_pg  # None: it is being made
            rank = group_rank if default is None else default.rank()
            waits_for = members if default is None or is_local(str(name)) else range(default.size())
            if announcer.call and rank is not None and rank in waits_for:
                announcer.meet(new_group(rank, str(name), members, waits_for))
            return real_helper(group_size, group_rank, ranks, *args, **kwargs)
        finally:
            being_made.pop()

    c10d._new_process_group_helper = make  # type: ignore[assignment]  # it passes everything on


def numbered(group: WatchedGroup) -> None:
    """Have the collectives of ``group`` counted anew in each call."""
    _groups.add(group)


def begin_call() -> None:
    """A call starts."""
    for group in _groups:
        group.count_anew()
