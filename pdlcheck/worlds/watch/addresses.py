"""Ranks and tags that a call names: each rank is told of those that there are not, before it meets another rank.

gloo refuses such a root, and a tag below zero; a message to or from a rank that is not there hangs its process, or ends
it.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["checked_tag", "global_rank"]

_SOURCES = ("broadcast", "recv", "scatter")
_TAGS = 2**31  # a tag is a C++ int


def global_rank(op: str, place: int, members: Sequence[int]) -> int:
    """Return the global rank of the root of a collective, or of the other end of a message.

    Raises:
        RuntimeError: the group has no such place.
    """
    if 0 <= place < len(members):
        return members[place]
    name = "src" if op in _SOURCES else "dst"
    whole = members == tuple(range(len(members)))
    raise RuntimeError(
        f"{op} got {name} {place}: {name} is "
        + (f"a rank from 0 to {len(members) - 1}" if whole else f"one of the ranks {', '.join(map(str, members))}")
        + f", group_{name} a place in the group from 0 to {len(members) - 1}"
    )


def checked_tag(op: str, tag: int) -> int:
    """Return a tag that goes with a message.

    Raises:
        RuntimeError: it is below zero.
        TypeError: it is too large.
    """
    if 0 <= tag < _TAGS:
        return tag
    told = f"{op} got tag {tag}: a tag is a number from 0 to {_TAGS - 1}"
    raise RuntimeError(told) if tag < 0 else TypeError(told)
