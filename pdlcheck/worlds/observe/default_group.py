"""Default groups that a program makes itself: of some ranks, or of all ranks in another order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["agree_on_number", "among_all", "members_of_default"]


def members_of_default(store: Any, place: int, size: int, rank: int) -> list[int]:
    """Return the global ranks of a default group, in group order; each rank of the group calls this.

    Args:
        store: the store through which torch makes the ranks meet.
        place: the number of this rank in the group.
        size: the number of ranks in the group.
        rank: the global rank of this process.
    """
    store.set(f"rank of place {place}", str(rank))
    return [int(store.get(f"rank of place {other}")) for other in range(size)]


def agree_on_number(store: Any, place: int, made: int) -> int:
    """Return the number of a default group among those that programs make in one call, the same on all of its ranks.

    torch gives each default group the same name, and counts its collectives from 0. Ranks may have made different
    numbers of default groups before, so the number of the first rank counts.

    Args:
        store: the store through which torch makes the ranks meet.
        place: the number of this rank in the group.
        made: how many default groups this rank has made in this call.
    """
    if place == 0:
        store.set("number of the group", str(made))
    return int(store.get("number of the group"))


def among_all(members: Sequence[int], world_size: int) -> str:
    """Return a text that distinguishes this default group from others; empty if it has all ranks in order."""
    return "" if list(members) == list(range(world_size)) else ".".join(map(str, members))
