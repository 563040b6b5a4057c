"""The check that the backward pass of a function that communicates is the derivative of its forward pass.

It is :func:`torch.autograd.gradcheck` for functions over several ranks, such as a hand-written
:class:`torch.autograd.Function` with a collective. The reference is a difference quotient, so the check needs no second
implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pdlcheck.checks.gradients.derivative_causes import CUT, NONE_RETURNED, Wrong, diagnose
from pdlcheck.checks.gradients.quotients import (
    UNCERTAIN,
    Moves,
    Pass,
    as_tuple,
    kinds_of,
    moves_of,
    pass_on_rank,
    strided_on_rank,
    words_of,
)
from pdlcheck.checks.message import Place, case, failure, first_index, name_of, show, takes_world
from pdlcheck.errors import CheckFailed, Inconclusive

__all__ = ["check_derivative"]

_TOLERANCE = 1e-7  # of the largest derivative: a quotient is less exact than a gradient


@takes_world
def check_derivative(
    fn: Callable[..., Tensor | tuple[Tensor, ...]],
    make_inputs: Callable[[int], Tensor | tuple[Any, ...]],
    world: Any,
    *,
    inputs: str | Sequence[str] = "own",
    outputs: str | Sequence[str] = "own",
    world_size: int = 2,
    seed: int = 0,
) -> None:
    """Check that the backward pass of ``fn`` is the derivative of the loss that all ranks compute together.

    Each rank calls ``fn(*make_inputs(rank))`` and weights its outputs with numbers of its own. The loss is the sum over
    all ranks. The check moves one element of one rank's input at a time and compares the change of the loss with the
    gradient that ``backward`` gave that element. A large input is also moved along a direction of all its elements.
    Last, ``backward`` gets the same gradients of the outputs in another memory order, as after a transpose, and must
    give the same result. The inputs are cast to float64, so parameters that ``fn`` uses must be float64, too.

    Args:
        fn: the function. It must give the same result for the same inputs. Its outputs are tensors.
        make_inputs: returns the inputs of a rank. Floating-point tensors get gradients; other values are passed on.
        world: where the ranks run.
        inputs: ``own`` if each rank's input is a variable of its own, as the samples are under data parallelism.
            ``replicated`` if the ranks hold copies of one variable, as the activations in front of a column-parallel
            layer are: then every rank must get the gradient of all copies together. One word for each floating-point
            input, or one for all.
        outputs: ``own`` if every rank's output is a part of the loss. ``replicated`` if the ranks hold copies of one
            result, which counts once, as the output of a row-parallel layer does. One word for each output, or one
            for all.
        world_size: the number of ranks; 3 or more also find a message that comes from the wrong neighbour.
        seed: the seed of the weights.

    Raises:
        AssertionError: a gradient is wrong, or an output that is declared as replicated differs between ranks. The
            message names rank, input, index and the likely cause: ``backward`` misses the all_reduce, the gradient is
            ``world_size`` times too large, it belongs to another place or rank, no gradient arrived.
        Inconclusive: the derivative is zero, the function has a kink at these inputs, or it draws random numbers.

    Example:
        >>> from pdlcheck.worlds import get_world
        >>> class Sum(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         y = x.clone()
        ...         dist.all_reduce(y)
        ...         return y
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         grad = grad.clone()
        ...         dist.all_reduce(grad)
        ...         return grad
        >>> check_derivative(Sum.apply, lambda rank: torch.randn(3), get_world("sim"))
    """
    __tracebackhide__ = True
    function = getattr(fn, "__self__", None)
    who = f"{function.__name__}.apply" if isinstance(function, type) else name_of(fn)
    made = [as_tuple(make_inputs(rank)) for rank in range(world_size)]
    places = [place for place, value in enumerate(made[0]) if isinstance(value, Tensor) and value.is_floating_point()]
    if not places:
        raise TypeError(f"make_inputs must return at least one floating-point tensor, got {kinds_of(made[0])}")
    of_inputs = words_of("inputs", inputs, len(places), "floating-point input")
    made = [
        tuple(
            made[0 if place in places and of_inputs[places.index(place)] == "replicated" else rank][place]
            for place in range(len(made[0]))
        )
        for rank in range(world_size)
    ]
    made = [tuple(one.double() if place in places else one for place, one in enumerate(each)) for each in made]
    moves = [[moves_of(one[place], seed, place) for place in places] for one in made]
    found: list[Pass] = world.run(pass_on_rank, fn, made, places, moves, outputs, seed, world_size=world_size)
    facts = case(world, world_size, inputs=",".join(of_inputs), outputs=_joined(outputs), seed=seed)
    if not all(one.same_again for one in found):
        raise Inconclusive(f"{who} gave two results for one input: it draws random numbers, or keeps state")
    _require_equal_copies(who, found, outputs, facts)
    _require_gradients(who, found, places, moves, of_inputs, facts)
    try:
        strided = world.run(strided_on_rank, fn, made, places, outputs, seed, world_size=world_size)
    except Exception as error:
        error.add_note("raised in a backward pass that got the same gradients of the outputs in another memory order")
        raise
    _require_same(who, [one.gradients for one in found], strided, places, facts)


def _require_equal_copies(who: str, found: Sequence[Pass], outputs: str | Sequence[str], facts: str) -> None:
    __tracebackhide__ = True
    words = words_of("outputs", outputs, len(found[0].outputs), "output")
    for number, (first, word) in enumerate(zip(found[0].outputs, words, strict=True)):
        for rank, one in enumerate(found):
            if word == "replicated" and not _close(one.outputs[number], first):
                raise failure(
                    f"{who}: output {number} of rank {rank} differs from that of rank 0, it is declared as replicated",
                    do="pass outputs='own' if each rank's output is a part of the loss",
                    case=facts,
                )


def _require_gradients(
    who: str,
    found: Sequence[Pass],
    places: Sequence[int],
    moves: Sequence[Sequence[Moves]],
    of_inputs: Sequence[str],
    facts: str,
) -> None:
    __tracebackhide__ = True
    ranks = range(len(found))
    derivatives = [
        [[found[part].quotients[rank][number] for part in ranks] for number in range(len(places))] for rank in ranks
    ]  # by rank and input: what each rank's part of the loss contributes
    scale = max(
        (float(each.abs().max()) for mine in derivatives for parts in mine for each in parts if len(each)), default=0.0
    )
    if not scale:
        raise Inconclusive(f"{who}: the loss does not depend on any input, no fault would show")
    for number, place in enumerate(places):
        own = [torch.stack(derivatives[rank][number]).sum(0) for rank in ranks]
        errors = [torch.stack([one.errors[rank][number] for one in found]).sum(0) for rank in ranks]
        replicated = of_inputs[number] == "replicated"
        for rank in ranks:
            if bool((errors[rank][: len(moves[rank][number].indices)] > UNCERTAIN * scale).any()):
                raise Inconclusive(
                    f"{who}: the difference quotient of input {place} on rank {rank} is not exact: the function has a "
                    "kink there, or does not compute in float64; choose other inputs, or make it compute in float64"
                )
        seen = [
            _seen(found, rank, number, moves[rank][number], derivatives[rank][number], own, errors, scale, replicated)
            for rank in ranks
        ]
        at_fault = [one.rank for one in seen if one.wrong.any()]
        if at_fault:
            raise _wrong_gradient(who, seen[at_fault[0]], place, at_fault, found[at_fault[0]].reached[number], facts)


def _seen(
    found: Sequence[Pass],
    rank: int,
    number: int,
    moves: Moves,
    parts: list[Tensor],
    own: list[Tensor],
    errors: list[Tensor],
    scale: float,
    replicated: bool,
) -> Wrong:
    """Return the gradient of an input on a rank beside its derivative, which may be the same."""
    expected = torch.stack(own).sum(0) if replicated else own[rank]
    held = found[rank].gradients[number]
    value = torch.zeros_like(expected) if held is None else moves.along(held)
    error = torch.stack(errors).sum(0) if replicated else errors[rank]
    slack = _TOLERANCE * scale + error
    # a kink near one of many elements spoils the quotient of all of them together
    wrong = ((value - expected).abs() > slack) & (error <= UNCERTAIN * scale)
    gradients = [one.gradients[number] for one in found]
    return Wrong(rank, value, expected, parts, own, moves, gradients, wrong, slack, replicated)


def _wrong_gradient(who: str, of: Wrong, place: int, at_fault: list[int], reached: bool, facts: str) -> CheckFailed:
    at = int(of.wrong.nonzero()[0])
    index = [index for index, _ in of.moves][at]
    where = "along a direction of all elements" if index is None else f"at {index}"
    no_gradient = of.gradients[of.rank] is None
    looked_at = len(of.moves.indices)
    return failure(
        f"{who}: the gradient of input {place} on rank {of.rank} is {show(of.held[at])} {where}, "
        f"the difference quotient of the loss is {float(of.expected[at]):.9g}",
        Place(of.rank, f"gradient of input {place}", index, of.held[at], of.expected[at]),
        wrong_elements=f"{int(of.wrong[:looked_at].sum())} of {looked_at} that were looked at",
        wrong_ranks=f"{', '.join(map(str, at_fault))} of {len(of.own)}",
        likely_cause=(NONE_RETURNED if reached else CUT) if no_gradient else diagnose(of),
        case=facts,
    )


def _require_same(
    who: str,
    contiguous: Sequence[Sequence[Tensor | None]],
    strided: Sequence[Sequence[Tensor | None]],
    places: Sequence[int],
    facts: str,
) -> None:
    """Check that gradients do not depend on the memory order of the gradients of the outputs."""
    __tracebackhide__ = True
    for number, place in enumerate(places):
        for rank, (rights, founds) in enumerate(zip(contiguous, strided, strict=True)):
            right, held = rights[number], founds[number]
            if held is None or right is None or _close(held, right):
                continue
            at = first_index(~torch.isclose(held, right, rtol=1e-9, atol=1e-12, equal_nan=True))
            raise failure(
                f"{who}: the gradient of input {place} on rank {rank} is {show(held[at])} at {at} if the gradients of "
                f"the outputs are not contiguous, {show(right[at])} if they are",
                Place(rank, f"gradient of input {place}", at, held[at], right[at]),
                likely_cause="backward assumes that gradients are contiguous, or a buffer of torch.empty_like(), which "
                "has the strides of its argument; call contiguous() on gradients first",
                case=facts,
            )


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=1e-9, atol=1e-12, equal_nan=True))


def _joined(words: str | Sequence[str]) -> str:
    return words if isinstance(words, str) else ",".join(words)
