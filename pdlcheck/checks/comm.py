"""What collectives must leave on every rank: exactly, because the inputs are integers stored as floats.

Every check takes the function, one input for each rank and a world. With ``ranks`` it runs in a group of
these global ranks, in this order, in a world with one rank more: the function is then called with
``group=``. Without, it is called on the default group. "Rank" in a message is the place in the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pdlcheck.checks.held import Calls, bits, listed
from pdlcheck.checks.message import failure, first_index, name_of, show, takes_world
from pdlcheck.checks.rings import exact_sum, short_rings

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
    ranks: Sequence[int] | None = None,
    in_place: bool = True,
) -> None:
    """Every rank must hold the sum over all ranks.

    Args:
        all_reduce: called as ``all_reduce(tensor)``, or ``all_reduce(tensor, group=group)``, on every rank.
        inputs: the tensor of each rank; their sum must be exact in any order, as it is for small integers. A view such
            as ``x[:, :2]`` is given as it is, with its strides: it shows what works on contiguous tensors only.
        world: where the ranks run.
        ranks: see the top of this module.
        in_place: True where the sum replaces the argument; False where it is returned and the argument stays.

    Raises:
        AssertionError: a rank holds something else; names rank, index, contributions and the likely cause.

    Example:
        >>> from pdlcheck.worlds import get_world
        >>> check_all_reduce(dist.all_reduce, [torch.ones(3), torch.ones(3)], get_world("sim"))
    """
    __tracebackhide__ = True
    calls = Calls(all_reduce, inputs, world, ranks)
    total = exact_sum(inputs)
    for rank, found in enumerate(calls.overwritten() if in_place else calls.returned()):

        def causes(rank: int = rank, found: Tensor = found) -> Iterator[tuple[str, Tensor]]:
            yield from short_rings(inputs, rank, found)
            yield from _causes_of_a_wrong_sum(inputs, rank, total)

        calls.require(rank, found, total, "the sum over ranks is", causes, contributions=inputs)


@takes_world
def check_all_reduce_agrees(
    all_reduce: Callable[..., Any],
    inputs: Sequence[Tensor],
    world: Any,
    *,
    ranks: Sequence[int] | None = None,
) -> None:
    """Of any floats, every rank must hold the same sum in the last bit, and that sum must be right.

    Replicas that add up in different orders drift apart. The sum may differ from the exact one by
    ``world_size * eps * sum(|x|)``, the bound for ``world_size`` terms added in any order.

    Args:
        all_reduce, inputs, world, ranks: as in :func:`check_all_reduce`; the sum replaces the argument.
    """
    __tracebackhide__ = True
    calls = Calls(all_reduce, inputs, world, ranks)
    exact = torch.stack([x.double() for x in inputs]).sum(0)
    bound = len(inputs) * torch.finfo(inputs[0].dtype).eps * torch.stack([x.double().abs() for x in inputs]).sum(0)
    held = calls.overwritten()
    for rank, found in enumerate(held):
        wrong = ~((found.double() - exact).abs() <= bound)
        if wrong.any():
            at = first_index(wrong)
            raise failure(
                f"{name_of(all_reduce)}: rank {rank} holds {show(found[at])} at {at}, "
                f"the sum over ranks is {show(exact[at])}",
                contributions=listed(inputs, at),
                allowed=f"{show(bound[at])} = world_size * eps * sum(|x|)",
                case=calls.facts,
            )
        differs = bits(found) != bits(held[0])
        if differs.any():
            at = first_index(differs)
            raise failure(
                f"{name_of(all_reduce)}: rank {rank} holds {show(found[at])} at {at}, "
                f"rank 0 holds {show(held[0][at])}: two round-offs of one sum",
                likely_cause="ranks add in different orders; let one rank add and send its sum to the others",
                case=calls.facts,
            )


@takes_world
def check_reduce_scatter(
    reduce_scatter: Callable[..., Any],
    inputs: Sequence[Tensor],
    world: Any,
    *,
    ranks: Sequence[int] | None = None,
) -> None:
    """Rank r must get part r of ``sum.tensor_split(world_size)``, and its argument must stay as it was.

    Args:
        reduce_scatter: called as ``reduce_scatter(tensor)``, returns this rank's part.
        inputs, world, ranks: as in :func:`check_all_reduce`; inputs have a dimension to split.
    """
    __tracebackhide__ = True
    calls = Calls(reduce_scatter, inputs, world, ranks)
    parts = exact_sum(inputs).tensor_split(len(inputs))
    for rank, found in enumerate(calls.returned()):
        own = [x.tensor_split(len(inputs))[rank] for x in inputs]

        def causes(rank: int = rank, own: list[Tensor] = own) -> Iterator[tuple[str, Tensor]]:
            for other, part in enumerate(parts):
                if other != rank:
                    yield f"it is part {other} of the sum: the wrong part", part
            yield from _causes_of_a_wrong_sum(own, rank, parts[rank])

        calls.require(rank, found, parts[rank], f"part {rank} of the sum holds", causes, contributions=own)


@takes_world
def check_all_gather(
    all_gather: Callable[..., Any],
    inputs: Sequence[Tensor],
    world: Any,
    *,
    ranks: Sequence[int] | None = None,
) -> None:
    """Every rank must get all inputs in rank order: stacked along a new first dimension, or as a list.

    Args:
        all_gather: called as ``all_gather(tensor)``, returns what it gathered.
        inputs, world, ranks: as in :func:`check_all_reduce`.
    """
    __tracebackhide__ = True
    calls = Calls(all_gather, inputs, world, ranks)
    expected = torch.stack(list(inputs))
    for rank, found in enumerate(calls.returned()):

        def causes(rank: int = rank) -> Iterator[tuple[str, Tensor]]:
            yield "these rows hold this rank's own input", inputs[rank].expand_as(expected)
            for shift in range(1, len(inputs)):
                yield f"the rows are shifted by {shift}", expected.roll(shift, 0)
            yield "these rows are zero: nothing arrived", torch.zeros_like(expected)

        calls.require(rank, found, expected, "the first index is a rank, and that rank gave", causes)


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
            yield "it is the sum over ranks", exact_sum(inputs)

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


def _causes_of_a_wrong_sum(inputs: Sequence[Tensor], rank: int, total: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What goes wrong in sums over ranks, and what ``rank`` would hold then; the likelier first."""
    world_size = len(inputs)
    own = inputs[rank]
    yield "it is this rank's own input: it was never reduced", own
    yield "it is the sum divided by world_size: a mean", total / world_size
    yield "it is world_size times the sum: it was reduced twice", total * world_size
    yield "it is world_size times this rank's own input", own * world_size
    for other, given in enumerate(inputs):
        yield f"the input of rank {other} is missing", total - given
        yield f"the input of rank {other} is counted twice", total + given
    for other, given in enumerate(inputs):
        yield f"it is the input of rank {other}: copied, not added", given
    if not own.is_complex():
        yield "it is the maximum over ranks", torch.stack(list(inputs)).amax(0)
        yield "it is the minimum over ranks", torch.stack(list(inputs)).amin(0)
    yield "it is the product over ranks", torch.stack(list(inputs)).prod(0)
    yield "it is zero", torch.zeros_like(total)
    for length in range(2, world_size):
        for start in range(world_size):
            arc = [(start + step) % world_size for step in range(length)]
            yield f"it is the sum over ranks {arc} only", exact_sum([inputs[place] for place in arc])
