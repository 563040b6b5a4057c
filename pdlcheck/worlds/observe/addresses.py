"""Checks of the ranks and tags that a call names: a rank gets the error before it meets another rank.

gloo refuses a root outside the group and a negative tag. A message to or from a rank outside the group makes its
process hang or exit.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdlcheck.operations.kind import OperationKind

__all__ = ["checked_tag", "global_rank"]

_TAGS = 2**31  # a tag is a C++ int


def global_rank(kind: OperationKind, place: int, members: Sequence[int]) -> int:
    """Return the global rank of the root of a collective, or of the other end of a message.

    Args:
        kind: the operation.
        place: the rank's number in the group.
        members: the global ranks of the group, in group order.

    Raises:
        RuntimeError: the group has no rank of that number.
    """
    if 0 <= place < len(members):
        return members[place]
    name = kind.root_name
    whole = members == tuple(range(len(members)))
    raise RuntimeError(
        f"{kind.name} got {name} {place}: {name} is "
        + (f"a rank from 0 to {len(members) - 1}" if whole else f"one of the ranks {', '.join(map(str, members))}")
        + f", group_{name} a place in the group from 0 to {len(members) - 1}"
    )


def checked_tag(op: str, tag: int) -> int:
    """Return ``tag`` if a message can have it.

    Args:
        op: the name of the operation.
        tag: the tag of a message.

    Raises:
        RuntimeError: the tag is below zero.
        TypeError: the tag is too large.
    """
    if 0 <= tag < _TAGS:
        return tag
    told = f"{op} got tag {tag}: a tag is a number from 0 to {_TAGS - 1}"
    raise RuntimeError(told) if tag < 0 else TypeError(told)
