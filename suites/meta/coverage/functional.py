"""Collectives that return their result, and collectives with a gradient, that of the sum of all ranks' losses."""

from __future__ import annotations

import torch

from ..parity import functional
from .entry import WORLD_SIZE, Feature, everywhere

RANKS = range(WORLD_SIZE)
UNEVEN = [1, 2, 3, 4]


def _of_all(n=4):
    return [torch.arange(float(n)) + rank for rank in RANKS]


def _leaves(n=4):
    return [x.requires_grad_() for x in _of_all(n)]


def _loss(outputs):
    """Return the sum of the ranks' losses; rank r weights its output by r + 1."""
    return sum((rank + 1) * output.sum() for rank, output in enumerate(outputs))


def _lists(*tensors):
    return [x.tolist() for x in tensors]


def all_reduce():
    xs = _of_all()
    return everywhere(_lists(sum(xs), torch.stack(xs).amax(0), sum(xs) / 4))


def all_gather():
    return everywhere(_lists(*(torch.cat([x.view(2, 2) for x in _of_all()], dim) for dim in (0, 1))))


def reduce_scatter():
    total = sum(torch.arange(16.0).view(4, 4) + rank for rank in RANKS)
    return [_lists(total[rank : rank + 1], total[:, rank : rank + 1]) for rank in RANKS]


def all_to_all():
    even = [torch.stack([x[rank] for x in _of_all()]).tolist() for rank in RANKS]
    uneven = [torch.cat([x.split(UNEVEN)[rank] for x in _of_all(10)]).tolist() for rank in RANKS]
    return list(zip(even, uneven, strict=True))


def several():
    sums, everything = [sum(_of_all(n)) for n in (1, 2)], [torch.cat(_of_all(n)) for n in (1, 2)]
    return everywhere(_lists(*sums, *everything))


def with_gradients():
    xs, zs = _leaves(), _leaves()
    y = torch.cat(xs)
    sum((y * torch.arange(16.0)).sum() for _ in RANKS).backward()
    _loss(sum(zs).split(1)).backward()
    return [(y.tolist(), x.grad.tolist(), z.grad.tolist()) for x, z in zip(xs, zs, strict=True)]


def gradient_of_all_reduce():
    xs = _leaves()
    _loss([sum(xs)] * WORLD_SIZE).backward()
    return [x.grad.tolist() for x in xs]


def gradient_of_all_gather():
    xs = _leaves(2)
    _loss([sum((rank + 1) * x for rank, x in enumerate(xs))] * WORLD_SIZE).backward()
    return [(_lists(*xs), x.grad.tolist()) for x in xs]


def gradient_of_broadcast():
    xs = _leaves(2)
    _loss([xs[1]] * WORLD_SIZE).backward()
    zeros = torch.zeros(2)
    return [(xs[1].tolist(), (zeros if x.grad is None else x.grad).tolist()) for x in xs]


def gradient_of_all_to_all():
    xs = _leaves()
    ys = [torch.stack([x[rank] for x in xs]) for rank in RANKS]
    _loss(ys).backward()
    return [(y.tolist(), x.grad.tolist()) for x, y in zip(xs, ys, strict=True)]


def gradient_of_gather_and_scatter():
    weights = torch.tensor([1.0, 2.0])
    xs, parts = _leaves(2), [(torch.arange(2.0) + 2).requires_grad_() for _ in RANKS]  # the parts of rank 2
    _loss([weights * x for x in xs]).backward()
    _loss([weights * part for part in parts]).backward()
    return [
        (
            _lists(*xs) if rank == 1 else None,
            xs[rank].grad.tolist(),
            parts[rank].tolist(),
            _lists(*(part.grad for part in parts)) if rank == 2 else None,
        )
        for rank in RANKS
    ]


def gradient_of_reduce():
    xs = _leaves(2)
    y = sum(xs)
    (4 * y).sum().backward()  # rank 3 has the sum
    return [(y.tolist() if rank == 3 else None, x.grad.tolist()) for rank, x in enumerate(xs)]


FEATURES = [
    Feature("functional all_reduce", functional.functional_all_reduce, all_reduce),
    Feature("functional all_gather_tensor", functional.functional_all_gather, all_gather),
    Feature("functional reduce_scatter_tensor", functional.functional_reduce_scatter, reduce_scatter),
    Feature("functional all_to_all_single", functional.functional_all_to_all, all_to_all),
    Feature("functional broadcast", functional.functional_broadcast, lambda: everywhere(_of_all()[2].tolist())),
    Feature("functional, coalesced", functional.functional_calls_on_several, several),
    Feature("functional, with gradients", functional.functional_calls_with_gradients, with_gradients),
    Feature("gradient of all_reduce", functional.gradient_of_all_reduce, gradient_of_all_reduce),
    Feature("gradient of all_gather", functional.gradient_of_all_gather, gradient_of_all_gather),
    Feature("gradient of broadcast", functional.gradient_of_broadcast, gradient_of_broadcast),
    Feature("gradient of all_to_all_single", functional.gradient_of_all_to_all_on_one_tensor, gradient_of_all_to_all),
    Feature("gradient of gather, scatter", functional.gradient_of_gather_and_scatter, gradient_of_gather_and_scatter),
    Feature("gradient of reduce", functional.gradient_of_reduce, gradient_of_reduce),
]
