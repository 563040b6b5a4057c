"""Ranks agree before they start: one rank's wrong argument is an error on all of them, so nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from pdlcheck.primitives.arguments import Members

__all__ = ["require_agreement"]


def require_agreement(caller: str, who: Members, facts: Callable[[], Mapping[str, object]]) -> None:
    """Every rank of ``who.group`` must find its own arguments right, and the same as those of the others.

    Args:
        caller: whom an error names.
        who: the ranks that take part; each of them must call.
        facts: checks this rank's arguments, raising ValueError or TypeError, and returns by name what must be the
            same on every rank; the values can be pickled and compared.

    Raises:
        TypeError, ValueError: on every rank the same, that of the first rank that raised; ValueError naming the first
            fact that two ranks have differently, and both values.

    Example:
        >>> from pdlcheck.primitives.arguments import members
        >>> def start():
        ...     try:
        ...         require_agreement("train", members("train", None), lambda: {"epochs": dist.get_rank() + 1})
        ...     except ValueError as error:
        ...         return str(error)
        >>> world.run(start, world_size=2)[0]
        'train needs the same epochs on every rank, got 1 on rank 0 and 2 on rank 1'
    """
    mine: tuple[str, Any]
    try:
        mine = "facts", dict(facts())
    except (TypeError, ValueError) as error:
        mine = type(error).__name__, str(error)
    everyone: list[Any] = [None] * who.world_size
    dist.all_gather_object(everyone, mine, who.group)
    failed = [place for place, (kind, _) in enumerate(everyone) if kind != "facts"]
    if failed:
        kind, text = everyone[failed[0]]
        where = f" (on rank {who.at(failed[0])})" if len(failed) < who.world_size else ""
        raise (TypeError if kind == "TypeError" else ValueError)(text + where)
    first = everyone[0][1]
    for place, (_, theirs) in enumerate(everyone):
        for name, value in first.items():
            if theirs.get(name) != value:
                raise ValueError(
                    f"{caller} needs the same {name} on every rank, "
                    f"got {value} on rank {who.at(0)} and {theirs.get(name)} on rank {who.at(place)}"
                )
