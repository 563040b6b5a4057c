"""Candidates for the likely cause of a wrong sharded layer, such as a sum over ranks that is missing or done twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pdlcheck.checks.tolerances import RELATIVE, ROUNDED

__all__ = [
    "Cause",
    "first",
    "multiple",
    "of_output",
    "of_parameter",
    "of_parts",
    "of_the_way_back",
    "off",
    "rounded",
    "scaled",
]

Cause = tuple[str, Tensor, Tensor]  # the text is likely if the two tensors are equal


def first(causes: Iterable[Cause], relative: float) -> str | None:
    """Return the text of the first likely cause, or None."""
    for text, one, other in causes:
        if one.shape == other.shape and not off(one, other, relative).any():
            return text
    return None


def off(value: Tensor, goal: Tensor, relative: float) -> Tensor:
    """Return a mask of the elements that differ.

    The tolerance is ``relative`` times the largest finite element of ``goal``.
    """
    finite = goal[goal.isfinite()].abs()
    allowed = relative * max(float(finite.max()), 1e-3) if finite.numel() else 0.0
    return ~(((value - goal).abs() <= allowed) | (value == goal) | (value.isnan() & goal.isnan()))


def rounded(value: Tensor, goal: Tensor) -> Iterator[Cause]:
    """Yield a cause if the layer is right but computes in float32 where the comparison is in float64."""
    if goal.any() and not off(value, goal, RELATIVE[torch.float32]).any():
        yield ROUNDED, goal, goal


def scaled(value: Tensor, goal: Tensor, world_size: int) -> Iterator[Cause]:
    """Yield the causes of a value that is zero, or a multiple of ``goal`` by world_size."""
    yield "it is zero, or None: nothing comes back", value, torch.zeros_like(goal)
    as_many = f"it is world_size = {world_size} times too"
    also = f", or a factor of {world_size} is missing"
    yield f"{as_many} large: summed over ranks once too often{also}", value, goal * world_size
    yield f"{as_many} small: divided once too often{also}", value, goal / world_size


def multiple(value: Tensor, goal: Tensor) -> Iterator[Cause]:
    """Yield the best-fitting multiple of ``goal``, for a value that no other cause explains."""
    if value.shape == goal.shape and goal.any():
        times = float((value * goal.conj()).sum().real / (goal * goal.conj()).sum().real)
        yield f"it is {times:.6g} times what it should be", value, goal * times


def of_parts(value: Tensor, goal: Tensor, everyone: Sequence[Tensor]) -> Iterator[Cause]:
    """Yield the causes in which each rank holds its part of the right value.

    Args:
        value: the tensor of this rank.
        goal: the right tensor of this rank.
        everyone: the tensor of each rank.
    """
    size = len(everyone)
    if all(part.shape == goal.shape for part in everyone):
        total = torch.stack(list(everyone)).sum(0)
        yield "it is this rank's own part: all ranks' parts add up to what is right", total, goal
        yield "it is this rank's own part: the mean over all ranks is right", total / size, goal
    for joined in range(goal.dim()):
        for cut in range(goal.dim()):
            if joined != cut and not goal.shape[cut] % size:
                other = torch.cat(goal.chunk(size, cut), joined).reshape(goal.shape)
                yield f"parts of dimension {cut} are joined along dimension {joined}", value, other


def of_the_way_back(value: Tensor, goal: Tensor) -> Iterator[Cause]:
    """Yield the cause of a wrong input gradient where outputs and the gradients of parameters are right."""
    if value.shape == goal.shape:
        yield (
            "outputs and gradients of parameters are right: the way back to the input is cut or wrong, as by a "
            "collective in the forward pass that has no backward pass",
            value,
            value,
        )


def of_output(
    value: Tensor, goal: Tensor, parameters: Mapping[str, Tensor], everyone: Sequence[Tensor]
) -> Iterator[Cause]:
    """Yield the causes of a wrong output, such as a bias that is added on each rank.

    Args:
        value: the output of this rank.
        goal: the right output of this rank.
        parameters: of the whole layer, by name.
        everyone: the output of each rank.
    """
    size = len(everyone)
    for name, parameter in parameters.items():
        if parameter.dim() == 1 and parameter.shape == value.shape[-1:]:
            own = parameter.detach()
            again = (size - 1) * own
            yield f"{name!r} is added on each rank, before the sum over ranks", value, goal + again
            averaged = own + (goal - own) / size
            yield f"{name!r} is added to the mean over ranks, where it belongs to the sum", value, averaged
            if all(part.shape == goal.shape for part in everyone):
                total = torch.stack(list(everyone)).sum(0) - again
                text = f"it is this rank's own part and {name!r}: all parts, and that once, add up to what is right"
                yield text, total, goal
    yield from scaled(value, goal, size)


def of_parameter(
    value: Tensor,
    goal: Tensor,
    numbers: Tensor,
    total: Tensor,
    holders: Tensor,
    world_size: int,
    namesakes: Sequence[Tensor],
) -> Iterator[Cause]:
    """Yield the causes of a wrong gradient of one parameter on one rank.

    Args:
        value: the gradient of this rank.
        goal: the right gradient.
        numbers: the number of each element in the whole layer; 0 where the parameter is padded.
        total: for each element, the sum of the gradients of all its holders.
        holders: for each element, the number of ranks that hold it.
        world_size: number of ranks.
        namesakes: the right gradient of this name on every rank, if the ranks hold different elements; otherwise empty.
    """
    padded = torch.where(numbers == 0, torch.zeros_like(value), value)
    yield "the whole layer has no such element: zeros that pad a parameter would be learned", padded, goal
    if (holders > 1).any():
        several = int(holders.max())
        yield f"it is {several} times too large: summed once too often over its holders", value, goal * holders
        yield f"it is {several} times too small: divided once too often by its holders", value * holders, goal
        yield f"it is this rank's own part: {several} ranks hold the parameter, and their sum is right", total, goal
    yield from scaled(value, goal, world_size)
    if namesakes:
        added = torch.stack(list(namesakes)).sum(0)
        for how, mixed in (("sum", added), ("mean", added / len(namesakes))):
            yield (
                f"it is the {how} over ranks that have other elements of the whole layer under this name: each keeps "
                "its own gradient",
                value,
                mixed,
            )
    yield from multiple(value, goal)
