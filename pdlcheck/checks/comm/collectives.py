"""The checks of collectives: each compares the result on every rank with the exact result.

Inputs are usually integers stored as floats, so nothing rounds and the comparison is exact.

Every check takes the function, one input for each rank, and a world. With ``ranks``, the function runs in a group of
these global ranks, in this order, and is called with ``group=``. The world then has at least one rank more than the
group. Without ``ranks``, the function is called on the default group. "Rank" in a message is the rank in the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from pdlcheck.checks.comm import causes
from pdlcheck.checks.comm.gathered import require_concatenated, require_list, require_stacked
from pdlcheck.checks.comm.reductions import reduction_of
from pdlcheck.checks.comm.rings import short_rings
from pdlcheck.checks.message import differs, failure, first_index, name_of, show, takes_world
from pdlcheck.checks.rank_results import Calls, bits, listed

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
    in_place: bool | None = True,
) -> None:
    """Check that every rank holds the sum over all ranks, or the result of another reduce-op.

    A sum of floats that depends on the order of adding may be off by ``world_size * eps * sum(|x|)``. A mean of floats
    may be off by ``world_size * eps * mean(|x|)``, and a product by ``world_size * eps * |product|``. These are the
    bounds for ``world_size`` terms in any order. All other results must be exact.

    Inputs of two or more dimensions are reduced once more, as transposed views. A function that takes only contiguous
    tensors may raise an error for them, but not leave or return a wrong result.

    Args:
        all_reduce: called as ``all_reduce(tensor)``, or ``all_reduce(tensor, group=group)``, on every rank.
        inputs: the tensor of each rank. Small integers find the most faults, because their sum is exact in any order.
            No product of some of the inputs may overflow or underflow their dtype. A view such as ``x[:, :2]`` keeps
            its strides: use one to find code that only works on contiguous tensors.
        world: where the ranks run.
        op: SUM, AVG, MAX, MIN or PRODUCT: the operation that ``all_reduce`` computes. The check does not pass it on;
            bind it, as in ``functools.partial(dist.all_reduce, op=op)``.
        ranks: global ranks of a group; see the top of this module.
        in_place: True if the result replaces the argument; False if it is returned and the argument stays unchanged;
            None if it is returned and the argument may be overwritten.

    Raises:
        AssertionError: a rank holds a wrong result. The message names rank, index, contributions and the likely cause.
        ValueError: ``op`` is another one, or does not fit the inputs: AVG of integers, MAX of complex numbers or NaN.

    Example:
        >>> from pdlcheck.worlds import get_world
        >>> check_all_reduce(dist.all_reduce, [torch.ones(3), torch.ones(3)], get_world("sim"))
    """
    __tracebackhide__ = True
    calls = Calls(all_reduce, inputs, world, ranks)
    reduction = reduction_of("check_all_reduce", op, inputs)
    expected, rounding = reduction.of(inputs), reduction.allowed(inputs)
    what = f"the {reduction.noun} over ranks is"
    for rank, found in enumerate(calls.overwritten() if in_place else calls.returned(unchanged=in_place is False)):
        usual = causes.of_reduction(reduction, inputs, rank)
        rare = causes.of_reduction_rarely(reduction, inputs)
        rings = short_rings(reduction, inputs, rank, found)
        # A maximum shows less about which ranks contributed.
        tables = [rings, usual, rare] if reduction.scale else [usual, rare, rings]
        calls.require(rank, found, expected, what, tables, contributions=inputs, rounding=rounding)
    strided = calls.with_strides()
    for rank, found in enumerate((strided.results() if strided is not None else None) or ()):
        assert strided is not None  # else there are no results
        tables = causes.of_strides(inputs, rank, found)
        strided.require(rank, found, expected, what, tables, contributions=inputs, rounding=rounding)


@takes_world
def check_all_reduce_agrees(
    all_reduce: Callable[..., Any],
    inputs: Sequence[Tensor],
    world: Any,
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ranks: Sequence[int] | None = None,
) -> None:
    """Check that every rank holds the same sum or mean of floats, equal in the last bit, and that it is right.

    Replicas whose ranks add in different orders drift apart. The result may differ from the exact one by the bounds of
    :func:`check_all_reduce`: ``world_size * eps * sum(|x|)`` for a sum.

    Args:
        all_reduce: called as ``all_reduce(tensor)``, or with ``group=group``; the result replaces the argument.
        inputs: the tensor of each rank: any floats.
        world: where the ranks run.
        op: SUM or AVG, as in :func:`check_all_reduce`.
        ranks: global ranks of a group, as in :func:`check_all_reduce`.

    Raises:
        AssertionError: a result is off by more than rounding, or two ranks hold different bits.
        ValueError: ``op`` is neither SUM nor AVG, or the inputs are not floats.
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
    in_place: Literal[False] | None = False,
) -> None:
    """Check that rank r gets part r of ``sum.tensor_split(world_size)``, and that its argument stays unchanged.

    Args:
        reduce_scatter: called as ``reduce_scatter(tensor)``; returns this rank's part.
        inputs: the tensor of each rank, as in :func:`check_all_reduce`; it has a dimension to split.
        world: where the ranks run.
        op: the operation that ``reduce_scatter`` computes, as in :func:`check_all_reduce`.
        ranks: global ranks of a group, as in :func:`check_all_reduce`.
        in_place: None if the argument may be overwritten, as by partial sums. The result is returned in any case.
    """
    __tracebackhide__ = True
    calls = Calls(reduce_scatter, inputs, world, ranks)
    reduction = reduction_of("check_reduce_scatter", op, inputs)
    parts = reduction.of(inputs).tensor_split(len(inputs))
    for rank, found in enumerate(calls.returned(unchanged=in_place is False)):
        own = [x.tensor_split(len(inputs))[rank] for x in inputs]
        others = (
            (f"it is part {other} of the {reduction.noun}: the wrong part", part)
            for other, part in enumerate(parts)
            if other != rank
        )
        usual = chain(others, causes.of_reduction(reduction, own, rank))
        tables = [usual, causes.of_reduction_rarely(reduction, own)]
        what = f"part {rank} of the {reduction.noun} holds"
        rounding = reduction.allowed(own)
        calls.require(rank, found, parts[rank], what, tables, contributions=own, rounding=rounding)


@takes_world
def check_all_gather(
    all_gather: Callable[..., Any],
    inputs: Sequence[Tensor],
    world: Any,
    *,
    dim: int | None = None,
    ranks: Sequence[int] | None = None,
) -> None:
    """Check that every rank gets all inputs in rank order: stacked along a new dimension, as a list, or concatenated.

    Args:
        all_gather: called as ``all_gather(tensor)``; returns the gathered inputs.
        inputs: the tensor of each rank, as in :func:`check_all_reduce`. Shapes may differ between ranks if a list is
            returned; :func:`pdlcheck.checks.strategies.uneven_rank_tensors` draws such inputs.
        world: where the ranks run.
        dim: the dimension along which one tensor holds all inputs; their sizes may differ in it. ``None`` stands for a
            new first dimension.
        ranks: global ranks of a group, as in :func:`check_all_reduce`.
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
    """Check that every rank holds the input of ``src``.

    Args:
        broadcast: called as ``broadcast(tensor, src=global_rank)``; overwrites its argument.
        inputs: the tensor of each rank, as in :func:`check_all_reduce`.
        world: where the ranks run.
        src: the position in ``inputs`` of the sending rank; with ``ranks``, its global rank is ``ranks[src]``.
        ranks: global ranks of a group, as in :func:`check_all_reduce`.
    """
    __tracebackhide__ = True
    calls = Calls(broadcast, inputs, world, ranks)
    if not 0 <= src < len(inputs):
        raise ValueError(f"src is a place in inputs, 0 to {len(inputs) - 1}, got {src}")

    def held_with(root: int) -> list[Tensor]:
        return calls.overwritten(src=root if ranks is None else ranks[root])

    def is_always(root: int) -> bool:
        try:
            return all(not differs(one, inputs[root]).any() for one in held_with(root))
        except Exception:  # such as a global rank that is not in the group
            return False

    held = held_with(src)
    for rank, found in enumerate(held):
        tables = [causes.of_another_root(inputs, held, src, ranks, is_always), causes.of_broadcast(inputs, rank, src)]
        calls.require(rank, found, inputs[src], f"rank {src} sent", tables)


@takes_world
def check_ring_pass(
    ring_pass: Callable[..., Any],
    inputs: Sequence[Tensor],
    world: Any,
    *,
    ranks: Sequence[int] | None = None,
) -> None:
    """Check that rank 0's input travels 0 -> 1 -> 2 -> ... -> 0, and that every rank adds 1 to it.

    Rank r must hold this input plus ``r + 1``. Rank 0 must hold the tensor that returned to it: its input plus
    ``world_size``.

    Args:
        ring_pass: called as ``ring_pass(tensor)``; overwrites its argument.
        inputs: the tensor of each rank, as in :func:`check_all_reduce`.
        world: where the ranks run.
        ranks: global ranks of a group, as in :func:`check_all_reduce`.
    """
    __tracebackhide__ = True
    calls = Calls(ring_pass, inputs, world, ranks)
    for rank, found in enumerate(calls.overwritten()):
        added = rank + 1 if rank else len(inputs)
        tables = [causes.of_ring_pass(inputs, rank, added)]
        calls.require(rank, found, inputs[0] + added, f"rank 0's input plus {added} is", tables)
