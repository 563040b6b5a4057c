"""Default groups that a program makes itself: of some ranks, or of all in another order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["agree_on_number", "among_all", "members_of_default"]


def members_of_default(store: Any, place: int, size: int, rank: int) -> list[int]:
    """The global ranks that make a default group, in its order; each of them calls this.

    Args:
        store: by which torch has them meet.
        place: of this rank in the group.
        size: of the group.
        rank: global, of this rank.
    """
    store.set(f"rank of place {place}", str(rank))
    return [int(store.get(f"rank of place {other}")) for other in range(size)]


def agree_on_number(store: Any, place: int, made: int) -> int:
    """The number of a default group among those that programs make in one call, the same on all of its ranks.

    torch calls each default group by one name, and counts its collectives from 0. Ranks may have made different
    numbers of them before, so that of the first rank counts.

    Args:
        store: by which torch has the ranks meet.
        place: of this rank in the group.
        made: how many this rank has made in this call.
    """
    if place == 0:
        store.set("number of the group", str(made))
    return int(store.get("number of the group"))


def among_all(members: Sequence[int], world_size: int) -> str:
    """Which ranks have this default group, for those of its groups to be told from others; empty if all in order."""
    return "" if list(members) == list(range(world_size)) else ".".join(map(str, members))
