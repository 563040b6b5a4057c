"""What a rank announces before it makes a group: all ranks make the same ones in one order, members or not."""

from __future__ import annotations

from collections.abc import Sequence

from pdlcheck.worlds.watch.callsite import user_line
from pdlcheck.worlds.watch.signature import NEW_GROUP, Signature

__all__ = ["is_local", "new_group"]


def is_local(name: str) -> bool:
    """Do the members alone meet? torch numbers groups, but not those made with ``use_local_synchronization``."""
    return not name.isdigit()


def new_group(rank: int, name: str, ranks: Sequence[int], waits_for: Sequence[int]) -> Signature:
    """``ranks`` are those of the group, ``waits_for`` all that have to be there."""
    listed = ", ".join(map(str, ranks))
    return Signature(rank, f"{NEW_GROUP}({listed})", f"made as {name}", tuple(waits_for), seq=0, where=user_line())
