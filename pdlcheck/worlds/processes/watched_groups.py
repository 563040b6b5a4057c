"""What watched groups of every backend have in common.

The members of a group meet at the controller before they connect: a group that some of them do not make can be
reported. Collectives are numbered from 0 in each call.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from pdlcheck.errors import Unsupported
from pdlcheck.worlds.processes.announce import Announcer
from pdlcheck.worlds.watch import Signature, WatchedGroup, user_line

__all__ = ["begin_call", "being_made", "meet_in_new_group", "numbered"]

being_made: list[tuple[str, tuple[int, ...]]] = []  # name and members of the groups under construction
_groups: weakref.WeakSet[WatchedGroup] = weakref.WeakSet()


def meet_in_new_group(announcer: Announcer) -> None:
    """From now on, the members of a new group wait for one another at the controller before they make it."""
    real_helper = getattr(c10d, "_new_process_group_helper", None)
    if real_helper is None:
        raise Unsupported(
            f"watched processes do not know torch {torch.__version__}: distributed_c10d lacks "
            "_new_process_group_helper; use ProcessWorld(watch=False), or a torch from the tested range"
        )

    def make(group_size: int, group_rank: int | None, ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        """In the place of torch's helper, which makes one group on one rank; returns what that returns."""
        _, _, name = args[:3]  # backend, store, name
        members = tuple(ranks) or tuple(range(group_size))
        being_made.append((str(name), members))
        try:
            if announcer.call and group_rank is not None:  # None: this rank is no member
                rank = members[group_rank]
                announcer.meet(Signature(rank, "new_group", str(name), members, where=user_line()))
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
        group._calls.clear()
