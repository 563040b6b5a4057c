"""Models that the data parallel suites train, and the gradients of a single process."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn

ddp = pytest.mark.verifies("DistributedDataParallel")
TINY = {"bucket_cap_mb": 1e-5, "first_bucket_mb": 1e-5}  # one bucket for each parameter, except single numbers


def fitting(subject, options):
    """Return ``options`` without ``first_bucket_mb`` if the wrapper has no such argument, such as torch's."""
    takes_it = "first_bucket_mb" in inspect.signature(subject).parameters
    return options if takes_it else {name: value for name, value in options.items() if name != "first_bucket_mb"}


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def alike(make=net):
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return make().double()


def samples(rank, n=4):
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def mean_gradients(world_size, loss, make=net):
    """Return the mean over ranks of the gradient of ``loss(model, rank)``, zero for a rank without one.

    One process computes it.
    """
    model = alike(make)
    sum(loss(model, rank) for rank in range(world_size)).backward()
    return {n: None if p.grad is None else p.grad / world_size for n, p in model.named_parameters()}


def require_close(found, expected):
    assert found.keys() == expected.keys()
    for name, goal in expected.items():
        assert (found[name] is None) == (goal is None), name
        if goal is not None:
            torch.testing.assert_close(found[name], goal, rtol=1e-12, atol=1e-12, msg=name)


def squared(model, rank):
    return model(samples(rank)).square().mean()


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.left, self.right, self.never = (nn.Linear(2, 2) for _ in range(4))

    def forward(self, x, left):
        y = torch.tanh(self.shared(x))
        return self.left(y) if left else self.right(y)


def plain_hook(state, bucket):
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
