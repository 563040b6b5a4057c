"""Candidates for the likely cause of a wrong sharded layer, such as a sum over ranks that is missing or done twice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pdlcheck.checks.diagnosis import Candidate
from pdlcheck.checks.tolerances import RELATIVE, ROUNDED, Tolerance

__all__ = [
    "Cause",
    "are_parts",
    "multiple",
    "of_input",
    "of_missing",
    "of_output",
    "of_parameter",
    "of_parts",
    "of_the_way_back",
    "rounded",
    "scaled",
    "tolerance_of",
    "undefined",
]

Cause = Candidate[Tensor]


def tolerance_of(relative: float) -> Tolerance:
    """Return the tolerance for a tensor; ``relative`` is of its largest element, and of 1e-3."""
    return Tolerance(relative=relative, absolute=relative * 1e-3)


def rounded(value: Tensor, goal: Tensor) -> Iterator[Cause]:
    """Yield a cause if the layer is right but computes in float32 where the comparison is in float64."""
    near = tolerance_of(RELATIVE[torch.float32]).accepts(value, goal)
    yield Candidate.when(ROUNDED, bool(goal.any()) and bool(near.all()))


def scaled(goal: Tensor, world_size: int, *, factors: bool = True) -> Iterator[Cause]:
    """Yield the causes of a value that is zero and, with ``factors``, of a multiple of ``goal`` by world_size."""
    yield Candidate.of("it is zero, or None: nothing comes back", torch.zeros_like(goal))
    if factors:
        as_many = f"it is world_size = {world_size} times too"
        also = f", or a factor of {world_size} is missing"
        yield Candidate.of(f"{as_many} large: summed over ranks once too often{also}", goal * world_size)
        yield Candidate.of(f"{as_many} small: divided once too often{also}", goal / world_size)


def multiple(value: Tensor, goal: Tensor) -> Iterator[Cause]:
    """Yield the best-fitting multiple of ``goal``, for a value that no other cause explains.

    A single element is a multiple of any other, so that it proves nothing.
    """
    if value.shape == goal.shape and goal.count_nonzero() > 1:
        times = float((value * goal.conj()).sum().real / (goal * goal.conj()).sum().real)
        if math.isfinite(times):
            yield Candidate.of(f"it is {times:.6g} times what it should be", goal * times)


def undefined(value: Tensor, goal: Tensor) -> Iterator[Cause]:
    """Yield a cause for a value with NaN where the right one has none."""
    without = bool(value.isnan().any()) and not bool(goal.isnan().any())
    yield Candidate.when("it is NaN: 0 / 0, as the mean or the variance of no samples, or inf - inf", without)


def of_parts(goal: Tensor, everyone: Sequence[Tensor], near: Tolerance) -> Iterator[Cause]:
    """Yield the causes in which each rank holds its part of the right value.

    Args:
        goal: the right tensor of this rank.
        everyone: the tensor of each rank.
        near: the tolerance.
    """
    size = len(everyone)
    if all(part.shape == goal.shape for part in everyone):
        total = torch.stack(list(everyone)).sum(0)
        yield _adds_up("it is this rank's own part: all ranks' parts add up to what is right", total, goal, near)
        yield _adds_up("it is this rank's own part: the mean over all ranks is right", total / size, goal, near)
    for joined in range(goal.dim()):
        for cut in range(goal.dim()):
            if joined != cut and not goal.shape[cut] % size:
                other = torch.cat(goal.chunk(size, cut), joined).reshape(goal.shape)
                yield Candidate.of(f"parts of dimension {cut} are joined along dimension {joined}", other)


def are_parts(goal: Tensor, everyone: Sequence[Tensor], gradients: Sequence[Tensor], near: Tolerance) -> bool:
    """Return whether the gradients of an input that all ranks share add up to the right one.

    A residual connection passes on the gradient of an output on each rank, so that it may be in each part.

    Args:
        goal: the right gradient.
        everyone: the gradient of each rank.
        gradients: of the outputs.
        near: the tolerance.
    """
    total = torch.stack(list(everyone)).sum(0)
    again = [torch.zeros_like(goal), *((len(everyone) - 1) * g for g in gradients if g.shape == goal.shape)]
    return any(bool(near.accepts(total - more, goal).all()) for more in again)


def of_input(goal: Tensor, everyone: Sequence[Tensor], gradients: Sequence[Tensor], near: Tolerance) -> Iterator[Cause]:
    """Yield the causes of a wrong gradient of an input; the arguments are those of :func:`are_parts`."""
    yield from scaled(goal, len(everyone))
    yield from of_parts(goal, everyone, near)
    if all(part.shape == goal.shape for part in everyone):
        text = (
            "it is this rank's own part beside a residual connection: all parts, and that once, add up to what is right"
        )
        alone = torch.stack(list(everyone)).sum(0)
        is_alone = bool(near.accepts(alone, goal).all())
        yield Candidate.when(text, not is_alone and are_parts(goal, everyone, gradients, near))


def of_the_way_back() -> Iterator[Cause]:
    """Yield the note for a wrong input gradient where outputs and the gradients of parameters are right."""
    yield Candidate.when(
        "outputs and gradients of parameters are right: the way back to the input is cut or wrong, as by a collective "
        "in the forward pass that has no backward pass",
        true=True,
    )


def of_missing(held: Tensor, own: Tensor, parameter: Tensor, ranks: int) -> str | None:
    """Return why no rank holds an element of a parameter, or None.

    Args:
        held: for each element of the whole layer, the number of ranks that hold it.
        own: the same for the elements of this parameter.
        parameter: the parameter in the whole layer.
        ranks: the number of ranks.
    """
    partly = bool(own.any()) or any(size < ranks for size in parameter.shape)
    if partly and any(size % ranks for size in parameter.shape):
        return "what is left over where a dimension does not divide by world_size"
    if again := int((own > 1).sum()):
        return f"{again} others of it are held by several ranks: these cut the same part"
    if int(held.sum()) == len(held) and bool(((held == 0) | (held == ranks)).all()):
        return (
            "ranks hold as many elements as the layer has, but all of them the same ones: each rank takes the part of "
            "one rank, as by numbers or names of layers that begin anew on each rank"
        )
    return None


def _adds_up(text: str, total: Tensor, goal: Tensor, near: Tolerance) -> Cause:
    """Return a cause that is true if the ranks' parts add up to the right value."""
    return Candidate.when(text, bool(near.accepts(total, goal).all()))


def of_output(
    goal: Tensor, parameters: Mapping[str, Tensor], everyone: Sequence[Tensor], near: Tolerance
) -> Iterator[Cause]:
    """Yield the causes of a wrong output, such as a bias that is added on each rank.

    Args:
        goal: the right output of this rank.
        parameters: of the whole layer, by name.
        everyone: the output of each rank.
        near: the tolerance.
    """
    size = len(everyone)
    for name, parameter in parameters.items():
        if parameter.dim() == 1 and parameter.shape == goal.shape[-1:]:
            own = parameter.detach()
            again = (size - 1) * own
            yield Candidate.of(f"{name!r} is added on each rank, before the sum over ranks", goal + again)
            averaged = own + (goal - own) / size
            yield Candidate.of(f"{name!r} is added to the mean over ranks, where it belongs to the sum", averaged)
            if all(part.shape == goal.shape for part in everyone):
                total = torch.stack(list(everyone)).sum(0) - again
                text = f"it is this rank's own part and {name!r}: all parts, and that once, add up to what is right"
                yield _adds_up(text, total, goal, near)
    yield from scaled(goal, size)
    if goal.numel() > 1 and goal.is_floating_point():
        yield Candidate.of(
            f"it is log({size}) = {math.log(size):.6g} too large: a sum of exponentials over ranks counts each term "
            f"{size} times, as where a loss for divided logits is given gathered ones",
            goal + math.log(size),
        )


def of_parameter(
    value: Tensor,
    goal: Tensor,
    numbers: Tensor,
    total: Tensor,
    holders: Tensor,
    world_size: int,
    namesakes: Sequence[Tensor],
    inputs_are_parts: bool,
    near: Tolerance,
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
        inputs_are_parts: whether the gradients of the layer's input are each rank's part of the right one.
        near: the tolerance.
    """
    padded = torch.where(numbers == 0, torch.zeros_like(value), value)
    unknown = "the whole layer has no such element: zeros that pad a parameter would be learned"
    yield Candidate.when(unknown, bool(near.accepts(padded, goal).all()))
    if (holders > 1).any():
        several = int(holders.max())
        large, small = f"it is {several} times too large", f"it is {several} times too small"
        yield Candidate.of(f"{large}: summed once too often over its holders", goal * holders)
        yield Candidate.of(f"{small}: divided once too often by its holders", goal / holders.clamp(min=1))
        own = f"it is this rank's own part: {several} ranks hold the parameter, and their sum is right"
        if inputs_are_parts:
            own = (
                "it is this rank's own part, and so is the gradient of the layer's input: the backward pass through "
                "the sharded layers does not add the gradient of their input over ranks"
            )
        yield _adds_up(own, total, goal, near)
    yield from scaled(goal, world_size, factors=not bool((holders == world_size).all()))
    if namesakes:
        added = torch.stack(list(namesakes)).sum(0)
        for how, mixed in (("sum", added), ("mean", added / len(namesakes))):
            yield Candidate.of(
                f"it is the {how} over ranks that have other elements of the whole layer under this name: each keeps "
                "its own gradient",
                mixed,
            )
