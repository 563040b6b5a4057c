"""What collectives must leave on every rank: exactly where nothing rounds, as inputs are integers stored as floats.

Every check takes the function, one input for each rank and a world. With ``ranks`` it runs in a group of
these global ranks, in this order, in a world with one rank more: the function is then called with
``group=``. Without, it is called on the default group. "Rank" in a message is the place in the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.checks.comm.gathered import require_concatenated, require_list, require_stacked
from pdlcheck.checks.comm.reductions import SUM, Reduction, reduction_of, reductions_for
from pdlcheck.checks.comm.rings import short_rings
from pdlcheck.checks.held import Calls, bits, listed
from pdlcheck.checks.message import failure, first_index, name_of, show, takes_world

__all__ = [
    "check_all_gather",
    "check_all_reduce",
    "check_all_reduce_agrees",
    "check_broadcast",
    "check_reduce_scatter",
    "check_ring_pass",
]


@takes_world
def check_all_reduce(
    all_reduce: Callable[..., Any],
    inputs: Sequence[Tensor],
    world: Any,
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ranks: Sequence[int] | None = None,
    in_place: bool = True,
) -> None:
    """Every rank must hold the sum over all ranks, or what another reduce-op makes of their tensors.

    A sum of floats that depends on the order of adding may be off by ``world_size * eps * sum(|x|)``, a mean or a
    product of floats by as many ``eps * mean(|x|)``, or ``|product|``, the bound for ``world_size`` terms in any order;
    all else is exact.

    Args:
        all_reduce: called as ``all_reduce(tensor)``, or ``all_reduce(tensor, group=group)``, on every rank.
        inputs: the tensor of each rank. Small integers show the most: their sum is exact in any order. No product of
            some of them may be too large or too small for their dtype. A view such as ``x[:, :2]`` is given as it is,
            with its strides: it shows what works on contiguous tensors only.
        world: where the ranks run.
        op: SUM, AVG, MAX, MIN or PRODUCT: what ``all_reduce`` computes, which it is not told: bind it, as in
            ``functools.partial(dist.all_reduce, op=op)``.
        ranks: see the top of this module.
        in_place: True where the result replaces the argument; False where it is returned and the argument stays.

    Raises:
        AssertionError: a rank holds something else; names rank, index, contributions and the likely cause.
        ValueError: ``op`` is another one, or is not for these inputs: AVG of integers, MAX of complex numbers or NaN.

    Example:
        >>> from pdlcheck.worlds import get_world
        >>> check_all_reduce(dist.all_reduce, [torch.ones(3), torch.ones(3)], get_world("sim"))
    """
    __tracebackhide__ = True
    calls = Calls(all_reduce, inputs, world, ranks)
    reduction = reduction_of("check_all_reduce", op, inputs)
    expected, rounding = reduction.of(inputs), reduction.allowed(inputs)
    what = f"the {reduction.noun} over ranks is"
    for rank, found in enumerate(calls.overwritten() if in_place else calls.returned()):

        def causes(rank: int = rank, found: Tensor = found) -> Iterator[tuple[str, Tensor]]:
            both = [short_rings(reduction, inputs, rank, found), _causes_of_a_wrong_result(reduction, inputs, rank)]
            for some in both if reduction.scale else both[::-1]:  # a maximum says less of who is in it
                yield from some

        calls.require(rank, found, expected, what, causes, contributions=inputs, rounding=rounding)


@takes_world
def check_all_reduce_agrees(
    all_reduce: Callable[..., Any],
    inputs: Sequence[Tensor],
    world: Any,
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ranks: Sequence[int] | None = None,
) -> None:
    """Of any floats, every rank must hold the same sum in the last bit, and that sum must be right; or the same mean.

    Replicas that add up in different orders drift apart. The sum may differ from the exact one by
    ``world_size * eps * sum(|x|)``, the bound for ``world_size`` terms added in any order.

    Args:
        all_reduce, inputs, world, op, ranks: as in :func:`check_all_reduce`; the result replaces the argument.

    Raises:
        ValueError: ``op`` is neither SUM nor AVG, or the inputs are no floats.
    """
    __tracebackhide__ = True
    calls = Calls(all_reduce, inputs, world, ranks)
    reduction = reduction_of("check_all_reduce_agrees", op, inputs)
    rounding = reduction.rounding(inputs)
    if rounding is None or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ValueError(
            f"check_all_reduce_agrees compares how sums and means of floats are rounded, got ReduceOp.{reduction.name} "
            f"of {inputs[0].dtype}; call check_all_reduce"
        )
    held = calls.overwritten()
    for rank, found in enumerate(held):
        wrong = rounding.excludes(found)
        if wrong.any():
            at = first_index(wrong)
            raise failure(
                f"{name_of(all_reduce)}: rank {rank} holds {show(found[at])} at {at}, "
                f"the {reduction.noun} over ranks is {show(rounding.exact[at])}",
                contributions=listed(inputs, at),
                allowed=rounding.told(at),
                case=calls.facts,
            )
        differs = bits(found) != bits(held[0])
        if differs.any():
            at = first_index(differs)
            raise failure(
                f"{name_of(all_reduce)}: rank {rank} holds {show(found[at])} at {at}, "
                f"rank 0 holds {show(held[0][at])}: two round-offs of one {reduction.noun}",
                likely_cause="ranks add in different orders; let one rank add and send its sum to the others",
                case=calls.facts,
            )


@takes_world
def check_reduce_scatter(
    reduce_scatter: Callable[..., Any],
    inputs: Sequence[Tensor],
    world: Any,
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ranks: Sequence[int] | None = None,
) -> None:
    """Rank r must get part r of ``sum.tensor_split(world_size)``, and its argument must stay as it was.

    Args:
        reduce_scatter: called as ``reduce_scatter(tensor)``, returns this rank's part.
        inputs, world, op, ranks: as in :func:`check_all_reduce`; inputs have a dimension to split.
    """
    __tracebackhide__ = True
    calls = Calls(reduce_scatter, inputs, world, ranks)
    reduction = reduction_of("check_reduce_scatter", op, inputs)
    parts = reduction.of(inputs).tensor_split(len(inputs))
    for rank, found in enumerate(calls.returned()):
        own = [x.tensor_split(len(inputs))[rank] for x in inputs]

        def causes(rank: int = rank, own: list[Tensor] = own) -> Iterator[tuple[str, Tensor]]:
            for other, part in enumerate(parts):
                if other != rank:
                    yield f"it is part {other} of the {reduction.noun}: the wrong part", part
            yield from _causes_of_a_wrong_result(reduction, own, rank)

        what = f"part {rank} of the {reduction.noun} holds"
        rounding = reduction.allowed(own)
        calls.require(rank, found, parts[rank], what, causes, contributions=own, rounding=rounding)


@takes_world
def check_all_gather(
    all_gather: Callable[..., Any],
    inputs: Sequence[Tensor],
    world: Any,
    *,
    dim: int | None = None,
    ranks: Sequence[int] | None = None,
) -> None:
    """Every rank must get all inputs in rank order: stacked along a new first dimension, as a list, or concatenated.

    Args:
        all_gather: called as ``all_gather(tensor)``, returns what it gathered.
        inputs, world, ranks: as in :func:`check_all_reduce`, but shapes may differ between ranks where a list is
            returned; :func:`pdlcheck.checks.strategies.uneven_rank_tensors` draws them.
        dim: the dimension along which one tensor holds all inputs, whose sizes may differ there; ``None`` is a new one.
    """
    __tracebackhide__ = True
    calls = Calls(all_gather, inputs, world, ranks, uneven=True)
    for rank, found in enumerate(calls.gathered()):
        if isinstance(found, list):
            require_list(calls, rank, found)
        elif dim is not None:
            require_concatenated(calls, rank, found, dim)
        else:
            require_stacked(calls, rank, found)


@takes_world
def check_broadcast(
    broadcast: Callable[..., Any],
    inputs: Sequence[Tensor],
    world: Any,
    *,
    src: int = 0,
    ranks: Sequence[int] | None = None,
) -> None:
    """Every rank must hold the input of ``src``.

    Args:
        broadcast: called as ``broadcast(tensor, src=global_rank)``; overwrites its argument.
        src: the place in ``inputs`` of the rank that sends; with ``ranks`` its global rank is ``ranks[src]``.
        inputs, world, ranks: as in :func:`check_all_reduce`.
    """
    __tracebackhide__ = True
    calls = Calls(broadcast, inputs, world, ranks)
    if not 0 <= src < len(inputs):
        raise ValueError(f"src is a place in inputs, 0 to {len(inputs) - 1}, got {src}")
    for rank, found in enumerate(calls.overwritten(src=src if ranks is None else ranks[src])):

        def causes(rank: int = rank) -> Iterator[tuple[str, Tensor]]:
            yield "it is this rank's own input: nothing arrived", inputs[rank]
            for other, given in enumerate(inputs):
                if other != src:
                    yield f"it is the input of rank {other}: the wrong rank sent", given
            yield "it is the sum over ranks", SUM.of(inputs)

        calls.require(rank, found, inputs[src], f"rank {src} sent", causes)


@takes_world
def check_ring_pass(
    ring_pass: Callable[..., Any],
    inputs: Sequence[Tensor],
    world: Any,
    *,
    ranks: Sequence[int] | None = None,
) -> None:
    """Rank 0's input goes 0 -> 1 -> 2 -> ... -> 0 and every rank adds 1 to it.

    Rank r must hold it plus ``r + 1``; rank 0 must hold what came home, it plus ``world_size``.

    Args:
        ring_pass: called as ``ring_pass(tensor)``; overwrites its argument.
        inputs, world, ranks: as in :func:`check_all_reduce`.
    """
    __tracebackhide__ = True
    calls = Calls(ring_pass, inputs, world, ranks)
    for rank, found in enumerate(calls.overwritten()):
        added = rank + 1 if rank else len(inputs)

        def causes(rank: int = rank, added: int = added) -> Iterator[tuple[str, Tensor]]:
            yield "it is this rank's own input: nothing arrived, nothing was added", inputs[rank]
            yield "it is this rank's own input plus 1: nothing arrived", inputs[rank] + 1
            for count in range(2 * len(inputs) + 1):
                yield f"1 was added {count} times instead of {added}", inputs[0] + count

        calls.require(rank, found, inputs[0] + added, f"rank 0's input plus {added} is", causes)


def _causes_of_a_wrong_result(
    reduction: Reduction, inputs: Sequence[Tensor], rank: int
) -> Iterator[tuple[str, Tensor]]:
    """What goes wrong in reductions over ranks, and what ``rank`` would hold then; the likelier first."""
    world_size, noun = len(inputs), reduction.noun
    yield "it is this rank's own input: it was never reduced", inputs[rank]
    yield from _wrong_factors(reduction, inputs, rank)
    for other, given in enumerate(inputs):
        if world_size > 1:
            others = [*inputs[:other], *inputs[other + 1 :]]
            yield f"the input of rank {other} is missing", reduction.of(others, world_size)
        yield f"the input of rank {other} is counted twice", reduction.of([*inputs, given], world_size)
    for other, given in enumerate(inputs):
        yield f"it is the input of rank {other}: copied, not {'added' if reduction is SUM else 'reduced'}", given
    for another in reductions_for(inputs[0].dtype):
        if another is not reduction:
            yield f"it is the {another.noun} over ranks", another.of(inputs)
    yield "it is zero", torch.zeros_like(inputs[rank])
    for length in range(2, world_size):
        for start in range(world_size):
            arc = [(start + step) % world_size for step in range(length)]
            yield f"it is the {noun} over ranks {arc} only", reduction.of([inputs[place] for place in arc])


def _wrong_factors(reduction: Reduction, inputs: Sequence[Tensor], rank: int) -> Iterator[tuple[str, Tensor]]:
    """Of sums and means."""
    world_size, own, total = len(inputs), inputs[rank], SUM.of(inputs)
    if reduction.name == "SUM":
        yield "it is the sum divided by world_size: a mean", total / world_size
        yield "it is world_size times the sum: it was reduced twice", total * world_size
        yield "it is world_size times this rank's own input", own * world_size
    elif reduction.name == "AVG":
        yield "it is the sum: it was not divided by world_size", total
        yield "it was divided by world_size twice", total / world_size / world_size
        yield "it is this rank's own input divided by world_size: nothing was added", own / world_size
