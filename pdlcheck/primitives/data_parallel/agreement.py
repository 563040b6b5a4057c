"""Comparison of models and options between ranks; all ranks raise the same error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pdlcheck.primitives.agreement import Exchange, exchange, require_same_rows
from pdlcheck.primitives.arguments import Members
from pdlcheck.primitives.flat import gradient_dtype

__all__ = ["raise_together", "require_alike"]


def require_alike(
    caller: str, tensors: Mapping[str, Tensor], options: Mapping[str, object], problem: str | None, who: Members
) -> None:
    """Raise ValueError unless every rank has the same names, shapes, dtypes, strides and options in the same order.

    Args:
        caller: the name of the calling function or class, for the error text.
        tensors: parameters and buffers of this rank.
        options: options by name; they are compared by their text.
        problem: an error already found on this rank; raised on every rank.
        who: the ranks.
    """
    rows = [(f"{name!r}", _text(tensor)) for name, tensor in tensors.items()]
    mine = rows, [(name, str(value)) for name, value in options.items()]
    found = exchange(mine, None if problem is None else ValueError(problem), who.group)
    _raise_first(caller, found, who)
    _, first_options = found.values[0]
    for place, (_, their_options) in enumerate(found.values):
        for (name, value), (_, other) in zip(first_options, their_options, strict=True):
            if value != other:
                raise ValueError(
                    f"{caller} got {name}={value} on rank {who.at(0)} and {name}={other} on rank {who.at(place)}; "
                    "pass the same on every rank"
                )
    require_same_rows(caller, [rows for rows, _ in found.values], who)


def raise_together(caller: str, problems: Sequence[str], who: Members) -> None:
    """Raise the first problem of any rank on every rank. Every rank must call it, even if its ``problems`` is empty."""
    _raise_first(caller, exchange(None, RuntimeError(problems[0]) if problems else None, who.group), who)


def _raise_first(caller: str, found: Exchange[Any], who: Members) -> None:
    first = found.first_error
    if first is not None:
        ranks = [who.at(place) for place, error in found.errors.items() if str(error) == str(first)]
        where = "every rank" if len(ranks) == who.world_size else f"rank {', '.join(map(str, ranks))}"
        raise type(first)(f"{caller}: on {where}, {first}")


def _text(tensor: Tensor) -> str:
    shape = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device.type}"
    strides = "" if tensor.is_contiguous() else f" with strides {tuple(tensor.stride())}"
    if not tensor.requires_grad:
        return shape + strides
    dtype = gradient_dtype(tensor)
    return f"{shape}{strides} that requires a gradient{'' if dtype == tensor.dtype else f' in {dtype}'}"
