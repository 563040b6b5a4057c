"""The signature of a new group: all ranks make the same groups in the same order, whether or not they are members."""

from __future__ import annotations

from collections.abc import Sequence

from pdlcheck.operations.signature import NEW_GROUP, Signature
from pdlcheck.worlds.observe.callsite import user_line

__all__ = ["is_local", "new_group"]


def is_local(name: str) -> bool:
    """Return whether only the members of group ``name`` meet.

    torch numbers groups, except those made with ``use_local_synchronization``.
    """
    return not name.isdigit()


def new_group(rank: int, name: str, ranks: Sequence[int], waits_for: Sequence[int]) -> Signature:
    """Return the signature of a new group with ``ranks``; ``waits_for`` are all ranks that must be there."""
    listed = ", ".join(map(str, ranks))
    return Signature(rank, f"{NEW_GROUP}({listed})", f"made as {name}", tuple(waits_for), seq=0, where=user_line())
