"""The causes of wrong results of collectives, each with the tensor that a rank would hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdlcheck.checks.comm.reductions import SUM, Reduction, reductions_for
from pdlcheck.checks.message import differs
from pdlcheck.checks.rank_results import Table

__all__ = ["of_another_root", "of_broadcast", "of_reduction", "of_reduction_rarely", "of_ring_pass", "of_strides"]


def of_broadcast(inputs: Sequence[Tensor], rank: int, src: int) -> Table:
    """Yield the usual faults of a broadcast."""
    yield "it is this rank's own input: nothing arrived", inputs[rank]
    for other, given in enumerate(inputs):
        if other not in (src, rank):
            yield f"it is the input of rank {other}: the wrong rank sent", given
    yield "it is the sum over ranks", SUM.of(inputs)


def of_another_root(
    inputs: Sequence[Tensor],
    held: Sequence[Tensor],
    src: int,
    ranks: Sequence[int] | None,
    is_always: Callable[[int], bool],
) -> Table:
    """Yield the input of another rank if every rank holds it, and why that rank may be the root.

    Args:
        inputs: the tensor of each rank in the group.
        held: the tensor that each rank holds after the broadcast.
        src: the number of the right root in the group.
        ranks: the global ranks of the group; None is the default group.
        is_always: returns whether a rank is also the root where it is meant to be, so that numbers prove nothing.
    """
    for other, given in enumerate(inputs):
        if other == src or not all(own.shape == given.shape and not differs(own, given).any() for own in held):
            continue
        text = f"every rank holds the input of rank {other}: the wrong rank sent"
        if ranks is not None and ranks[other] == src and not is_always(other):
            text += (
                f"; it is global rank {src}, and the right one is number {src} in the group, global rank {ranks[src]}: "
                "a number in the group is used as a global rank"
            )
        elif ranks is not None and ranks[src] == other and not is_always(other):
            text += f"; it is number {other} in the group, and the right one is global rank {other}: a global rank is "
            text += "used as a number in the group"
        yield text, given


def of_ring_pass(inputs: Sequence[Tensor], rank: int, added: int) -> Table:
    """Yield the usual faults of a ring pass that adds 1 on each rank, ``added`` times up to ``rank``."""
    yield "it is this rank's own input: nothing arrived, nothing was added", inputs[rank]
    yield "it is this rank's own input plus 1: nothing arrived", inputs[rank] + 1
    for count in range(0 if rank else 2, 2 * len(inputs) + 1):  # rank 0 sent its own input
        yield f"1 was added {count} times instead of {added}", inputs[0] + count


def of_reduction(reduction: Reduction, inputs: Sequence[Tensor], rank: int) -> Table:
    """Yield the usual faults of reductions, each with the tensor that ``rank`` would hold."""
    world_size = len(inputs)
    yield "it is this rank's own input: it was never reduced", inputs[rank]
    yield from _wrong_factors(reduction, inputs, rank)
    for other, given in enumerate(inputs):
        others = [*inputs[:other], *inputs[other + 1 :]]
        if len(others) > 1 or reduction.name == "AVG":  # a single other input is a cause of its own
            yield f"the input of rank {other} is missing", reduction.of(others, world_size)
        yield f"the input of rank {other} is counted twice", reduction.of([*inputs, given], world_size)
    for other, given in enumerate(inputs):
        if other != rank:
            yield f"it is the input of rank {other}: copied, not {'added' if reduction is SUM else 'reduced'}", given
    yield "it is zero", torch.zeros_like(inputs[rank])


def of_reduction_rarely(reduction: Reduction, inputs: Sequence[Tensor]) -> Table:
    """Yield the results of other reduce-ops, and of some of the ranks."""
    world_size = len(inputs)
    for another in reductions_for(inputs[0].dtype):
        if another is not reduction:
            yield f"it is the {another.noun} over ranks", another.of(inputs)
    for length in range(2, world_size):
        for start in range(world_size):
            arc = [(start + step) % world_size for step in range(length)]
            yield f"it is the {reduction.noun} over ranks {arc} only", reduction.of([inputs[place] for place in arc])


def _wrong_factors(reduction: Reduction, inputs: Sequence[Tensor], rank: int) -> Table:
    """Yield the faults of sums and means that scale the result by a wrong factor."""
    world_size, own, total = len(inputs), inputs[rank], SUM.of(inputs)
    if reduction.name == "SUM":
        yield "it is the sum divided by world_size: a mean", total / world_size
        yield "it is world_size times the sum: it was reduced twice", total * world_size
        yield "it is world_size times this rank's own input", own * world_size
    elif reduction.name == "AVG":
        yield "it is the sum: it was not divided by world_size", total
        yield "it was divided by world_size twice", total / world_size / world_size
        yield "it is this rank's own input divided by world_size: nothing was added", own / world_size


def of_strides(inputs: Sequence[Tensor], rank: int, found: Tensor) -> list[Table]:
    """Return the causes of a wrong result for views, where the same values in contiguous memory give the right one."""
    right = "with the same values in contiguous memory it is right"
    copied = f"its own input came back: {right}; contiguous() copies a view, and the sum went into the copy"
    strides = f"it depends on the strides of its argument: {right}; raise an error if it takes no views"
    return [[(copied, inputs[rank])], [(strides, found)]]
