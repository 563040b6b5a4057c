"""The check that the backward pass of a function that communicates is the derivative of its forward pass.

It is :func:`torch.autograd.gradcheck` for functions over several ranks, such as a hand-written
:class:`torch.autograd.Function` with a collective. The reference is a difference quotient, so the check needs no second
implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.checks.diagnosis import Candidate, explain, predictions
from pdlcheck.checks.message import Place, case, failure, name_of, show, takes_world
from pdlcheck.checks.tolerances import Tolerance
from pdlcheck.errors import Inconclusive

__all__ = ["check_derivative"]

KINDS = ("own", "replicated")
CUT = (
    "no gradient arrived: a collective of torch.distributed cuts the graph; put it into a torch.autograd.Function "
    "whose backward pass communicates"
)
_STEP = 1e-4  # of inputs around 1: the quotient of fourth order is then exact to about 1e-11
_TINY = 1e-5  # the part of a step that only a loss in float64 follows
_TOLERANCE = 1e-7  # of the largest derivative: a quotient is less exact than a gradient
_UNCERTAIN = 1e-3  # of the largest derivative: a quotient with a larger error proves nothing
_MOST = 6  # elements of one input that are looked at; more are drawn


@dataclass(frozen=True)
class _Pass:
    """What one rank found.

    ``gradients`` are those of its inputs at the elements looked at, None where no gradient arrived. ``quotients`` are
    the derivatives of its own part of the loss: by the rank whose input moved, input and element. ``errors`` are bounds
    of their errors.
    """

    gradients: list[Tensor | None]
    quotients: list[list[Tensor]]
    errors: list[list[Tensor]]
    outputs: list[Tensor]
    same_again: bool


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
    gradient that ``backward`` gave that element. The inputs are cast to float64, so parameters that ``fn`` uses must be
    float64, too.

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
            ``world_size`` times too large, no gradient arrived.
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
    made = [_tuple(make_inputs(rank)) for rank in range(world_size)]
    places = [place for place, value in enumerate(made[0]) if isinstance(value, Tensor) and value.is_floating_point()]
    if not places:
        raise TypeError(f"make_inputs must return at least one floating-point tensor, got {_kinds_of(made[0])}")
    of_inputs = _words("inputs", inputs, len(places), "floating-point input")
    made = [
        tuple(
            made[0 if place in places and of_inputs[places.index(place)] == "replicated" else rank][place]
            for place in range(len(made[0]))
        )
        for rank in range(world_size)
    ]
    made = [tuple(one.double() if place in places else one for place, one in enumerate(each)) for each in made]
    elements = [[_elements(one[place], _generator(seed, place)) for place in places] for one in made]
    found: list[_Pass] = world.run(_passes, fn, made, places, elements, outputs, seed, world_size=world_size)
    facts = case(world, world_size, inputs=",".join(of_inputs), outputs=_joined(outputs), seed=seed)
    if not all(one.same_again for one in found):
        raise Inconclusive(f"{who} gave two results for one input: it draws random numbers, or keeps state")
    _require_equal_copies(who, found, outputs, facts)
    _require_gradients(who, found, places, elements, of_inputs, facts)


def _require_equal_copies(who: str, found: Sequence[_Pass], outputs: str | Sequence[str], facts: str) -> None:
    __tracebackhide__ = True
    words = _words("outputs", outputs, len(found[0].outputs), "output")
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
    found: Sequence[_Pass],
    places: Sequence[int],
    elements: Sequence[Sequence[Tensor]],
    of_inputs: Sequence[str],
    facts: str,
) -> None:
    __tracebackhide__ = True
    ranks = range(len(found))
    derivatives = [
        [[found[part].quotients[rank][number] for part in ranks] for number in range(len(places))] for rank in ranks
    ]  # by rank and input: what each rank's part of the loss contributes
    scale = max(float(each.abs().max()) for mine in derivatives for parts in mine for each in parts)
    if not scale:
        raise Inconclusive(f"{who}: the loss does not depend on any input, no fault would show")
    for number, place in enumerate(places):
        own = [torch.stack(derivatives[rank][number]).sum(0) for rank in ranks]
        errors = [torch.stack([one.errors[rank][number] for one in found]).sum(0) for rank in ranks]
        replicated = of_inputs[number] == "replicated"
        for rank in ranks:
            if bool((errors[rank] > _UNCERTAIN * scale).any()):
                raise Inconclusive(
                    f"{who}: the difference quotient of input {place} on rank {rank} is not exact: the function has a "
                    "kink there, or does not compute in float64; choose other inputs, or make it compute in float64"
                )
        for rank in ranks:
            expected = torch.stack(own).sum(0) if replicated else own[rank]
            held = found[rank].gradients[number]
            value = torch.zeros_like(expected) if held is None else held
            slack = _TOLERANCE * scale + (torch.stack(errors).sum(0) if replicated else errors[rank])
            wrong = (value - expected).abs() > slack
            if not bool(wrong.any()):
                continue
            at = int(wrong.nonzero()[0])
            index = tuple(int(i) for i in elements[rank][number][at])
            raise failure(
                f"{who}: the gradient of input {place} on rank {rank} is {show(value[at])} at {index}, "
                f"the difference quotient of the loss is {float(expected[at]):.9g}",
                Place(rank, f"gradient of input {place}", index, value[at], expected[at]),
                wrong_elements=f"{int(wrong.sum())} of {len(value)} that were looked at",
                likely_cause=CUT
                if held is None
                else explain(
                    value,
                    *_candidates(expected, derivatives[rank][number], own, rank, replicated=replicated),
                    tolerance=Tolerance(absolute=slack),
                    expected=expected,
                    wrong=wrong,
                ),
                case=facts,
            )


def _candidates(
    expected: Tensor, parts: list[Tensor], own: list[Tensor], rank: int, *, replicated: bool
) -> list[Iterator[Candidate[Tensor]]]:
    """Return the tables of causes, the usual ones first.

    Args:
        expected: the derivative by an input of a rank.
        parts: what the output of each rank contributes to it.
        own: the derivative by the input of each rank.
        rank: the rank.
        replicated: whether the ranks hold copies of one input.
    """
    world_size = len(own)
    of_own_outputs = (
        "it has only the part of this rank's own outputs: backward lacks the communication that brings the output "
        "gradients of the other ranks",
        parts[rank],
    )
    of_own_copy = (
        "it has only the part of this rank's copy: backward lacks the all_reduce over the ranks that hold the "
        "replicated input",
        own[rank],
    )
    usual = [
        ("backward returns zeros", torch.zeros_like(expected)),
        of_own_copy if replicated else of_own_outputs,
        (
            f"it is world_size = {world_size} times too large: equal gradients are added over the ranks",
            world_size * expected,
        ),
        (f"it is divided by world_size = {world_size}: averaged in place of summed", expected / world_size),
        ("it has the wrong sign", -expected),
    ]
    rare = [
        of_own_outputs,
        (
            "it has only the part of the other ranks' outputs: backward leaves out this rank's own",
            torch.stack(parts).sum(0) - parts[rank],
        ),
    ]
    rarest = []
    if len({each.shape for each in own}) == 1:
        total = torch.stack(own).sum(0)
        rarest = [
            ("it is the sum of the gradients of all ranks, although the input is this rank's own", total),
            ("it is the mean of the gradients of all ranks", total / world_size),
            *((f"it is the gradient of rank {other}", own[other]) for other in range(world_size) if other != rank),
        ]
    return [predictions(usual), predictions(rare), predictions(rarest)]


def _passes(
    fn: Callable[..., Any],
    made: Sequence[tuple[Any, ...]],
    places: Sequence[int],
    elements: Sequence[Sequence[Tensor]],
    kinds: str | Sequence[str],
    seed: int,
) -> _Pass:
    """Run on a rank: one backward pass, then the forward passes with one element moved."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = [one.clone() if isinstance(one, Tensor) else one for one in made[rank]]
    for place in places:
        mine[place].requires_grad_()
    outputs = _tuple(fn(*mine))
    if not all(isinstance(one, Tensor) for one in outputs):
        raise TypeError(f"the function must return tensors, it returned {_kinds_of(outputs)}")
    words = _words("outputs", kinds, len(outputs), "output")
    weights = [
        torch.randn(
            one.shape, dtype=torch.float64, generator=_generator(seed, 0 if word == "replicated" else 1 + rank, n)
        )
        for n, (one, word) in enumerate(zip(outputs, words, strict=True))
    ]
    ends = [(one, weight) for one, weight in zip(outputs, weights, strict=True) if one.requires_grad]
    if ends:
        torch.autograd.backward([one for one, _ in ends], [weight.to(one.dtype, copy=True) for one, weight in ends])
    gradients = [
        None if mine[place].grad is None else _at(mine[place].grad, elements[rank][number])
        for number, place in enumerate(places)
    ]
    shares = [1 / world_size if word == "replicated" else 1.0 for word in words]

    def loss(moved: int = -1, place: int = -1, index: Any = None, by: float = 0.0) -> float:
        values = [one.clone() if isinstance(one, Tensor) else one for one in made[rank]]
        if moved == rank:
            values[place][tuple(index)] += by
        with torch.no_grad():
            results = _tuple(fn(*values))
        return sum(
            share * float((one.double() * weight).sum())
            for one, weight, share in zip(results, weights, shares, strict=True)
        )

    here = loss()
    same_again = here == loss()
    quotients: list[list[Tensor]] = []
    errors: list[list[Tensor]] = []
    for moved in range(world_size):
        quotients.append([])
        errors.append([])
        for number, place in enumerate(places):
            pairs = [
                _quotient(partial(loss, moved, place, index), here, float(made[moved][place][tuple(index)]))
                for index in elements[moved][number]
            ]
            both = torch.tensor(pairs, dtype=torch.float64)
            quotients[-1].append(both[:, 0])
            errors[-1].append(both[:, 1])
    return _Pass(gradients, quotients, errors, [one.detach().double() for one in outputs], same_again)


def _quotient(loss: Callable[[float], float], here: float, value: float) -> tuple[float, float]:
    """Return the difference quotient of fourth order at an element, and a bound of its error.

    The error is large at a kink, where the slopes on the two sides differ, and if the loss does not follow a tiny step,
    because it is computed in fewer digits than float64 has.

    Args:
        loss: the loss with the element moved by a number.
        here: the loss with the element in place.
        value: the element.
    """
    step = _STEP * max(1.0, abs(value))
    (near, bend), (far, wide_bend), (tiny, _) = (
        ((loss(by) - loss(-by)) / (2 * by), (loss(by) - 2 * here + loss(-by)) / by)
        for by in (step, 2 * step, step * _TINY)
    )
    best = (4 * near - far) / 3
    coarse = abs(best - tiny)
    return best, 10 * abs(best - near) + abs(2 * bend - wide_bend) + (coarse if coarse > _UNCERTAIN * abs(best) else 0)


def _elements(value: Tensor, generator: torch.Generator) -> Tensor:
    """Return the indices of the elements to look at: all of a small tensor, else some that are drawn."""
    if value.numel() <= _MOST:
        chosen = torch.arange(value.numel())
    else:
        chosen = torch.randperm(value.numel(), generator=generator)[:_MOST].sort().values
    return (
        torch.stack(torch.unravel_index(chosen, value.shape), 1)
        if value.dim()
        else torch.empty(1, 0, dtype=torch.int64)
    )


def _at(tensor: Tensor | None, indices: Tensor) -> Tensor:
    assert tensor is not None
    return torch.stack([tensor[tuple(index)] for index in indices]).detach().double()


def _generator(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(numbers) % 2**63)


def _words(name: str, given: str | Sequence[str], count: int, what: str) -> list[str]:
    """Return one of ``KINDS`` for each tensor."""
    words = [given] * count if isinstance(given, str) else list(given)
    if len(words) != count:
        raise ValueError(f"{name} must be one word, or one for each of the {count} {what}s, got {len(words)}")
    if unknown := [word for word in words if word not in KINDS]:
        raise ValueError(f"{name} must be 'own' or 'replicated', got {unknown[0]!r}")
    return words


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=1e-9, atol=1e-12, equal_nan=True))


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _joined(words: str | Sequence[str]) -> str:
    return words if isinstance(words, str) else ",".join(words)


def _kinds_of(values: Sequence[object]) -> str:
    return ", ".join(type(one).__name__ for one in values)
