"""The common part of the watched groups of every backend.

Before a group is made, all ranks meet at the controller. So the controller can report a group that some ranks do not
make, or make in another order. Collectives are numbered from 0 in each call.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed.distributed_c10d as c10d

from pdlcheck.compat.torch.c10d import NEW_GROUP
from pdlcheck.errors import Unsupported
from pdlcheck.worlds.observe import (
    WatchedGroup,
    agree_on_number,
    among_all,
    is_local,
    key_among,
    members_of_default,
    new_group,
)
from pdlcheck.worlds.processes.rank.coordinator import OperationCoordinator

__all__ = ["begin_call", "being_made", "meet_in_new_group", "numbered"]

_SIMULATED = "sim"


class Made(NamedTuple):
    """The properties of a group that torch does not pass to its class.

    Args:
        name: torch's name of the group.
        members: global ranks, in group order.
        among: the text that distinguishes the group's default group from others; see ``among_all``.
    """

    name: str
    members: tuple[int, ...]
    among: str


being_made: list[Made] = []  # the groups under construction, innermost last
_default = Made("", (), "")  # the default group of this process
_defaults = 0  # number of default groups that the program has made in this call
_groups: weakref.WeakSet[WatchedGroup] = weakref.WeakSet()


def meet_in_new_group(coordinator: OperationCoordinator) -> None:
    """Make ranks wait for one another at the controller before they make a group, from now on.

    All ranks of the default group wait, or only the members if the group is made with ``use_local_synchronization``.

    Raises:
        Unsupported: this torch lacks the function that makes groups.
    """
    if not NEW_GROUP.is_there():
        raise Unsupported(
            f"watched processes do not know torch {torch.__version__}: it lacks {NEW_GROUP.path}; "
            "use ProcessWorld(watch=False), or a torch from the tested range"
        )
    real_helper = NEW_GROUP.value

    def make(group_size: int, group_rank: int | None, ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        """Meet the other ranks, then call torch's helper, which makes one group on one rank; return its result."""
        backend, store, name = args[:3]
        if backend == _SIMULATED:  # the group of a world that this rank simulates in its own process
            return real_helper(group_size, group_rank, ranks, *args, **kwargs)
        global _default, _defaults
        members, among = tuple(ranks) or tuple(range(group_size)), ""
        if c10d.GroupMember.WORLD is None:  # this group becomes the default group
            if coordinator.call and not coordinator.is_beginning:  # the program makes it; else it has all ranks
                members = tuple(members_of_default(store, group_rank or 0, group_size, coordinator.rank))
                _defaults += 1
                number = agree_on_number(store, group_rank or 0, _defaults)
                among = f"{among_all(members, coordinator.world_size)}#{number}"
            _default = Made(str(name), members, among)
        else:
            members, among = tuple(_default.members[place] for place in members), _default.among
        made = Made(str(name), members, among)
        waits_for = members if is_local(made.name) else _default.members
        being_made.append(made)
        try:
            if coordinator.call and coordinator.rank in waits_for:
                coordinator.meet(new_group(coordinator.rank, key_among(made.name, made.among), members, waits_for))
            return real_helper(group_size, group_rank, ranks, *args, **kwargs)
        finally:
            being_made.pop()

    setattr(NEW_GROUP.owner, NEW_GROUP.attribute, make)


def numbered(group: WatchedGroup) -> None:
    """Restart the numbers of the collectives of ``group`` at 0 in each call."""
    _groups.add(group)


def begin_call() -> None:
    """Start to number collectives and default groups anew, because a call starts."""
    global _defaults
    _defaults = 0
    for group in _groups:
        group.count_anew()
