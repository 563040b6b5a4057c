"""The result of an all-gather on every rank: all inputs in rank order, in one of three forms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pdlcheck.checks.message import failure, name_of
from pdlcheck.checks.rank_results import Calls, Table

__all__ = ["require_concatenated", "require_list", "require_stacked"]

_PADDED = "it is as long as the longest: padding was not cut off"


def require_stacked(calls: Calls, rank: int, found: Tensor) -> None:
    """Check that a tensor holds the inputs of all ranks, stacked in rank order along its first dimension."""
    __tracebackhide__ = True
    inputs = calls.inputs
    if _differ_in_shape(inputs):
        raise failure(
            f"{name_of(calls.subject)}: rank {rank} returned one tensor, of shape {tuple(found.shape)}; inputs of "
            "different shapes cannot be stacked: return a list, or pass dim= where they are concatenated",
            case=calls.facts,
        )
    expected = torch.stack(list(inputs))

    def causes() -> Table:
        yield "these rows hold this rank's own input", inputs[rank].expand_as(expected)
        for shift in range(1, len(inputs)):
            yield f"the rows are shifted by {shift}", expected.roll(shift, 0)
        yield "these rows are zero: nothing arrived", torch.zeros_like(expected)

    forms = [(f"concatenated along dimension {dim}, which dim={dim} accepts", shape) for dim, shape in _joined(inputs)]
    calls.require(rank, found, expected, "the first index is a rank, and that rank gave", [causes()], forms=forms)


def require_list(calls: Calls, rank: int, found: Sequence[Tensor]) -> None:
    """Check that a list holds the inputs of all ranks, in rank order."""
    __tracebackhide__ = True
    inputs = calls.inputs
    if not _differ_in_shape([*inputs, *found]):
        require_stacked(calls, rank, torch.stack(list(found)))
        return
    if len(found) != len(inputs):
        raise failure(
            f"{name_of(calls.subject)}: rank {rank} returned {len(found)} tensors, expected one for each of "
            f"{len(inputs)} ranks",
            case=calls.facts,
        )
    for other, (part, given) in enumerate(zip(found, inputs, strict=True)):
        causes = [
            ("it is this rank's own input", inputs[rank]),
            *((f"it is the input of rank {place}", one) for place, one in enumerate(inputs) if place != rank),
            ("it is zero: nothing arrived", torch.zeros_like(given)),
        ]
        forms = [("it is as large as this rank's own input", inputs[rank].shape), (_PADDED, _padded_shape(inputs))]
        of = f" of the tensor of rank {other}"
        calls.require(rank, part, given, f"rank {other} gave", [causes], of=of, forms=forms)


def require_concatenated(calls: Calls, rank: int, found: Tensor, dim: int) -> None:
    """Check that a tensor holds the inputs of all ranks, concatenated in rank order along ``dim``."""
    __tracebackhide__ = True
    inputs = calls.inputs
    try:
        expected = torch.cat(list(inputs), dim)
    except (IndexError, RuntimeError) as error:
        raise ValueError(f"the check of {name_of(calls.subject)} cannot concatenate its inputs: {error}") from None
    count = len(inputs)

    def causes() -> Table:
        yield "it is this rank's own input, over and over", torch.cat([inputs[rank]] * count, dim)
        for shift in range(1, count):
            order = [(place - shift) % count for place in range(count)]
            yield f"the ranks are in the order {order}", torch.cat([inputs[place] for place in order], dim)
        for other in range(0 if _differ_in_shape(inputs) else expected.dim()):
            viewed = torch.cat(list(inputs), other)
            if other != dim % expected.dim():
                text = f"concatenated along dimension {other} and viewed in this shape: move the dimension"
                yield text, viewed.reshape(expected.shape)
        yield "these elements are zero: nothing arrived", torch.zeros_like(expected)

    padded = list(_padded_shape(inputs))
    padded[dim] *= count
    stacked = torch.Size([count, *inputs[0].shape])
    forms = [("it is stacked along a new first dimension", stacked), (_PADDED, torch.Size(padded))]
    calls.require(rank, found, expected, f"concatenated along dimension {dim} the inputs hold", [causes()], forms=forms)


def _joined(inputs: Sequence[Tensor]) -> Iterator[tuple[int, torch.Size]]:
    """Yield each dimension with the shape of the inputs concatenated along it."""
    for dim in range(inputs[0].dim()):
        yield dim, torch.cat(list(inputs), dim).shape


def _differ_in_shape(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) > 1


def _padded_shape(inputs: Sequence[Tensor]) -> torch.Size:
    """Return the smallest shape that all inputs fit into."""
    return torch.Size([max(sizes) for sizes in zip(*(one.shape for one in inputs), strict=False)])
