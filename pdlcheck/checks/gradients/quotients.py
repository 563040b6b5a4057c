"""The gradients of a function over ranks, and the difference quotients of its loss, as one rank finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "KINDS",
    "UNCERTAIN",
    "Moves",
    "Pass",
    "as_tuple",
    "kinds_of",
    "moves_of",
    "pass_on_rank",
    "strided_on_rank",
    "words_of",
]

KINDS = ("own", "replicated")
UNCERTAIN = 1e-3  # of the largest derivative: a quotient with a larger error proves nothing
_STEP = 1e-4  # of inputs around 1: the quotient of fourth order is then exact to about 1e-11
_TINY = 1e-5  # the part of a step that only a loss in float64 follows
_MOST = 6  # elements of one input that are looked at; more are drawn


@dataclass(frozen=True)
class Moves:
    """The ways in which one input is moved: one element at a time, and all elements of a large input together.

    ``direction`` has the length 1. It is None for a small input, of which all elements are looked at.
    """

    indices: Tensor
    direction: Tensor | None

    def __iter__(self) -> Iterator[tuple[tuple[int, ...] | None, Tensor | float]]:
        """Yield what is moved, None for all elements, and the way that it moves."""
        for index in self.indices.tolist():
            yield tuple(index), 1.0
        if self.direction is not None:
            yield None, self.direction

    def along(self, gradient: Tensor) -> Tensor:
        """Return the derivative along each move that a gradient gives."""
        found = [gradient[tuple(index)] for index in self.indices.tolist()]
        if self.direction is not None:
            found.append((gradient * self.direction).sum())
        return torch.stack(found)


@dataclass(frozen=True)
class Pass:
    """The results of one rank.

    ``gradients`` are those of its inputs, None where no gradient arrived. ``reached`` is whether the input is in the
    graph of the outputs. ``quotients`` are the derivatives of its own part of the loss: by the rank whose input moved,
    input and move. ``errors`` are bounds of their errors.
    """

    gradients: list[Tensor | None]
    reached: list[bool]
    quotients: list[list[Tensor]]
    errors: list[list[Tensor]]
    outputs: list[Tensor]
    same_again: bool


def pass_on_rank(
    fn: Callable[..., Any],
    made: Sequence[tuple[Any, ...]],
    places: Sequence[int],
    moves: Sequence[Sequence[Moves]],
    kinds: str | Sequence[str],
    seed: int,
) -> Pass:
    """Run on a rank: one backward pass, then the forward passes with an input moved."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first = _backward(fn, made[rank], places, lambda outputs: _weights(outputs, kinds, seed))
    weights, words = first.weights, words_of("outputs", kinds, len(first.outputs), "output")
    shares = [1 / world_size if word == "replicated" else 1.0 for word in words]

    def loss(moved: int, place: int, index: tuple[int, ...] | None, way: Tensor | float, by: float) -> float:
        values = [_copy(one) for one in made[rank]]
        if moved == rank and index is None:
            values[place] += by * torch.as_tensor(way, device=values[place].device)
        elif moved == rank:
            values[place][index] += by
        with torch.no_grad():
            results = as_tuple(fn(*values))
        return sum(
            share * float((one.double().cpu() * weight).sum())
            for one, weight, share in zip(results, weights, shares, strict=True)
        )

    here = loss(-1, -1, None, 0.0, 0.0)
    same_again = here == loss(-1, -1, None, 0.0, 0.0)
    quotients: list[list[Tensor]] = []
    errors: list[list[Tensor]] = []
    for moved in range(world_size):
        quotients.append([])
        errors.append([])
        for number, place in enumerate(places):
            pairs = [
                _quotient(
                    partial(loss, moved, place, index, way),
                    here,
                    1.0 if index is None else max(1.0, abs(float(made[moved][place][index]))),
                )
                for index, way in moves[moved][number]
            ]
            both = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2)
            quotients[-1].append(both[:, 0])
            errors[-1].append(both[:, 1])
    return Pass(first.gradients, first.reached, quotients, errors, first.outputs, same_again)


def strided_on_rank(
    fn: Callable[..., Any],
    made: Sequence[tuple[Any, ...]],
    places: Sequence[int],
    kinds: str | Sequence[str],
    seed: int,
) -> list[Tensor | None]:
    """Run on a rank: the same backward pass, with output gradients that are not contiguous. Return the gradients."""
    mine = made[dist.get_rank()]
    return _backward(
        fn, mine, places, lambda outputs: [_transposed(one) for one in _weights(outputs, kinds, seed)]
    ).gradients


@dataclass(frozen=True)
class _Backward:
    """The results of one backward pass."""

    outputs: list[Tensor]
    weights: list[Tensor]
    gradients: list[Tensor | None]
    reached: list[bool]


def _backward(
    fn: Callable[..., Any],
    made: Sequence[Any],
    places: Sequence[int],
    weights_of: Callable[[Sequence[Tensor]], list[Tensor]],
) -> _Backward:
    leaves = {place: made[place].clone().requires_grad_() for place in places}
    # copies, because a function may write into its inputs, which autograd forbids for leaves
    given = [leaves[place].clone() if place in leaves else _copy(one) for place, one in enumerate(made)]
    outputs = as_tuple(fn(*given))
    if not all(isinstance(one, Tensor) for one in outputs):
        raise TypeError(f"the function must return tensors, it returned {kinds_of(outputs)}")
    weights = weights_of(outputs)
    ends = [(one, weight) for one, weight in zip(outputs, weights, strict=True) if one.requires_grad]
    in_graph = _leaves_of([one for one, _ in ends])
    held = [one.detach().double().cpu() for one in outputs]
    if ends:  # clone() keeps the strides
        torch.autograd.backward([one for one, _ in ends], [weight.clone().to(one) for one, weight in ends])
    gradients = [None if leaf.grad is None else leaf.grad.detach().double().cpu() for leaf in leaves.values()]
    return _Backward(held, weights, gradients, [id(leaf) in in_graph for leaf in leaves.values()])


def _weights(outputs: Sequence[Tensor], kinds: str | Sequence[str], seed: int) -> list[Tensor]:
    """Return the weights of the outputs in the loss; those of a replicated output are the same on all ranks."""
    words = words_of("outputs", kinds, len(outputs), "output")
    starts = [0 if word == "replicated" else 1 + dist.get_rank() for word in words]
    return [
        torch.randn(one.shape, dtype=torch.float64, generator=_generator(seed, start, n))
        for n, (one, start) in enumerate(zip(outputs, starts, strict=True))
    ]


def _transposed(tensor: Tensor) -> Tensor:
    """Return a tensor of the same values that is not contiguous, if it has two dimensions or more."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def _quotient(loss: Callable[[float], float], here: float, scale: float) -> tuple[float, float]:
    """Return the difference quotient of fourth order, and a bound of its error.

    The error is large at a kink, where the slopes on the two sides differ, and if the loss does not follow a tiny step,
    because it is computed in fewer digits than float64 has.

    Args:
        loss: the loss with the input moved by a number.
        here: the loss with the input in place.
        scale: the size of what is moved, 1 or more.
    """
    step = _STEP * scale
    found = []
    for by in (step, 2 * step, step * _TINY):
        above, below = loss(by), loss(-by)
        found.append(((above - below) / (2 * by), (above - 2 * here + below) / by))
    (near, bend), (far, wide_bend), (tiny, _) = found
    best = (4 * near - far) / 3
    coarse = abs(best - tiny)
    return best, 10 * abs(best - near) + abs(2 * bend - wide_bend) + (coarse if coarse > UNCERTAIN * abs(best) else 0)


def moves_of(value: Tensor, seed: int, place: int) -> Moves:
    """Return the moves of an input: all elements of a small tensor, else some that are drawn, and a direction."""
    generator = _generator(seed, place)
    if value.numel() <= _MOST:
        chosen, direction = torch.arange(value.numel()), None
    else:
        chosen = torch.randperm(value.numel(), generator=generator)[:_MOST].sort().values
        drawn = torch.randn(value.shape, dtype=torch.float64, generator=generator)
        direction = drawn / drawn.norm()
    if not value.dim():
        return Moves(torch.empty(1, 0, dtype=torch.int64), None)
    return Moves(torch.stack(torch.unravel_index(chosen, value.shape), 1), direction)


def words_of(name: str, given: str | Sequence[str], count: int, what: str) -> list[str]:
    """Return one of ``KINDS`` for each tensor."""
    words = [given] * count if isinstance(given, str) else list(given)
    if len(words) != count:
        raise ValueError(f"{name} must be one word, or one for each of the {count} {what}s, got {len(words)}")
    if unknown := [word for word in words if word not in KINDS]:
        raise ValueError(f"{name} must be 'own' or 'replicated', got {unknown[0]!r}")
    return words


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return the values of a tuple or list; a single value is one of them."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def kinds_of(values: Sequence[object]) -> str:
    """Return the names of the types of values."""
    return ", ".join(type(one).__name__ for one in values)


def _leaves_of(outputs: Sequence[Tensor]) -> set[int]:
    """Return the identities of the leaves in the graph of the outputs."""
    found: set[int] = set()
    seen: set[Any] = set()
    ahead: list[Any] = [one.grad_fn for one in outputs]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        ahead.extend(other for other, _ in node.next_functions)
    return found


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _generator(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(numbers) % 2**63)
