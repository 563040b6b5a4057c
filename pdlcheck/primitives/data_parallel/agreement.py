"""Ranks compare what they hold, and all of them raise the same error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from pdlcheck.primitives.arguments import Members

__all__ = ["raise_together", "require_alike"]

T = TypeVar("T")


def require_alike(
    caller: str, tensors: Mapping[str, Tensor], options: Mapping[str, object], problem: str | None, who: Members
) -> None:
    """Every rank must have the same names, shapes, dtypes, strides and options in the same order.

    Args:
        caller: who asks.
        tensors: parameters and buffers of this rank.
        options: by name; what they are compared by is their text.
        problem: what is wrong on this rank already; raised on all of them.
        who: the ranks.
    """
    rows = [(f"{name!r}", _text(tensor)) for name, tensor in tensors.items()]
    mine = problem, rows, [(name, str(value)) for name, value in options.items()]
    everyone = _gathered(mine, who)
    _raise_first(caller, [problem for problem, _, _ in everyone], who, ValueError)
    _, first, first_options = everyone[0]
    for place, (_, theirs, their_options) in enumerate(everyone):
        for (name, value), (_, other) in zip(first_options, their_options, strict=True):
            if value != other:
                raise ValueError(
                    f"{caller} got {name}={value} on rank {who.at(0)} and {name}={other} on rank {who.at(place)}; "
                    "pass the same on every rank"
                )
        for position in range(max(len(first), len(theirs))):
            here, there = (" ".join(rows[position]) if position < len(rows) else "nothing" for rows in (first, theirs))
            if here != there:
                raise ValueError(
                    f"{caller} needs the same model on every rank: tensor {position} is {here} on rank {who.at(0)}, "
                    f"{there} on rank {who.at(place)}; make it in the same way and order on all ranks"
                )


def raise_together(caller: str, problems: Sequence[str], who: Members) -> None:
    """Raise on every rank what is wrong on some; called on all of them, also where ``problems`` is empty."""
    everyone = _gathered(problems[0] if problems else None, who)
    _raise_first(caller, everyone, who, RuntimeError)


def _raise_first(caller: str, everyone: Sequence[str | None], who: Members, error: type[Exception]) -> None:
    found = [(who.at(place), problem) for place, problem in enumerate(everyone) if problem is not None]
    if not found:
        return
    text = found[0][1]
    ranks = [rank for rank, problem in found if problem == text]
    where = "every rank" if len(ranks) == who.world_size else f"rank {', '.join(map(str, ranks))}"
    raise error(f"{caller}: on {where}, {text}")


def _gathered(mine: T, who: Members) -> list[T]:
    everyone = [mine] * who.world_size
    dist.all_gather_object(everyone, mine, group=who.group)
    return everyone


def _text(tensor: Tensor) -> str:
    shape = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device.type}"
    strides = "" if tensor.is_contiguous() else f" with strides {tuple(tensor.stride())}"
    return shape + strides + (" that requires a gradient" if tensor.requires_grad else "")
