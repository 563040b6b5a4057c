"""The causes of gradients that are not the derivative of a function over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain, predictions
from pdlcheck.checks.gradients.quotients import Moves
from pdlcheck.checks.tolerances import Tolerance

__all__ = ["CUT", "NONE_RETURNED", "Wrong", "diagnose"]

CUT = (
    "no gradient arrived: a collective of torch.distributed, or detach(), cuts the graph; put a collective into a "
    "torch.autograd.Function whose backward pass communicates"
)
NONE_RETURNED = "no gradient arrived: backward returns None for this input, on which the outputs depend"


@dataclass(frozen=True)
class Wrong:
    """The evidence of a wrong gradient of one input on one rank.

    Args:
        rank: the rank.
        held: the derivative that the gradient gives along each move.
        expected: the difference quotient along each move.
        parts: the quotients of each rank's part of the loss, which add up to the derivative by this rank's input.
        own: the derivative by the input of each rank.
        moves: the moves.
        gradients: the gradient of this input on each rank, None where none arrived.
        wrong: the mask of the moves that are wrong.
        slack: the allowed error along each move.
        replicated: whether the ranks hold copies of one input.
    """

    rank: int
    held: Tensor
    expected: Tensor
    parts: Sequence[Tensor]
    own: Sequence[Tensor]
    moves: Moves
    gradients: Sequence[Tensor | None]
    wrong: Tensor
    slack: Tensor
    replicated: bool


def diagnose(of: Wrong) -> Diagnosis:
    """Return the causes that explain the gradient, the usual ones first."""
    return explain(
        of.held,
        _usual(of),
        *map(predictions, _rare(of)),
        _factor(of),
        _places(of),
        tolerance=Tolerance(absolute=of.slack),
        expected=of.expected,
        wrong=of.wrong,
    )


def _of_own_outputs(of: Wrong) -> tuple[str, Tensor]:
    return (
        "it has only the part of this rank's own outputs: backward lacks the communication that brings the output "
        "gradients of the other ranks",
        of.parts[of.rank],
    )


def _usual(of: Wrong) -> Iterator[Candidate[Tensor]]:
    world_size = len(of.own)
    of_own_copy = (
        "it has only the part of this rank's copy: backward lacks the all_reduce, or the gather, over the ranks that "
        "hold the replicated input",
        of.own[of.rank],
    )
    gradient = of.gradients[of.rank]
    yield Candidate.when("backward returns zeros", gradient is not None and not gradient.any())
    yield from predictions(
        [
            of_own_copy if of.replicated else _of_own_outputs(of),
            (
                f"it is world_size = {world_size} times too large: equal gradients are added over the ranks",
                world_size * of.expected,
            ),
            (f"it is divided by world_size = {world_size}: averaged in place of summed", of.expected / world_size),
            ("it has the wrong sign", -of.expected),
        ]
    )


def _rare(of: Wrong) -> Iterator[list[tuple[str, Tensor]]]:
    world_size = len(of.own)
    yield [
        _of_own_outputs(of),
        (
            "it has only the part of the other ranks' outputs: backward leaves out this rank's own",
            torch.stack(list(of.parts)).sum(0) - of.parts[of.rank],
        ),
    ]
    if len({each.shape for each in of.own}) == 1:
        total = torch.stack(list(of.own)).sum(0)
        yield [
            ("it is the sum of the gradients of all ranks, although the input is this rank's own", total),
            ("it is the mean of the gradients of all ranks", total / world_size),
            *(
                (f"it is the gradient of rank {other}", of.own[other])
                for other in range(world_size)
                if other != of.rank
            ),
        ]


def _factor(of: Wrong) -> Iterator[Candidate[Tensor]]:
    """Yield the factor that all derivatives of this input have on this rank."""
    right = of.expected.dot(of.expected)
    if int(of.wrong.sum()) > 1 and right > 0:
        factor = float(of.held.dot(of.expected) / right)
        yield Candidate.of(
            f"it is {factor:.6g} times the difference quotient: backward has a factor that forward does not have, or "
            "lacks one",
            factor * of.expected,
        )


def _places(of: Wrong) -> Iterator[Candidate[Tensor]]:
    """Yield a cause for right numbers at other places, each of which is found exactly once."""
    searched = [of.rank] if of.replicated else [rank for rank, one in enumerate(of.gradients) if one is not None]
    first = ""
    for at, (index, _) in enumerate(of.moves):
        if index is None or not of.wrong[at]:
            continue
        found = [
            (rank, tuple(place))
            for rank in searched
            for place in ((of.gradients[rank] - of.expected[at]).abs() <= of.slack[at]).nonzero().tolist()  # type: ignore[operator]
        ]
        if len(found) != 1 or abs(float(of.expected[at])) <= float(of.slack[at]):
            return
        (rank, place), whose = found[0], "rank"
        whose = "this rank" if rank == of.rank else f"rank {rank}"
        first = first or f"the difference quotient at {index} is what {whose} holds at {place}"
    if first and int(of.wrong.sum()) > 1:
        yield Candidate.when(
            f"the right numbers are at other places, {first}: backward splits, joins or orders along another "
            "dimension, or for another rank, than forward",
            True,
        )
