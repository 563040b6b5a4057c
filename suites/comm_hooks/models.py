"""Models and gradients that several suites of communication hooks share."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck import primitives
from pdlcheck.primitives import PowerSGDState, TopKState, power_sgd, top_k

wrappers = pytest.mark.parametrize(
    "wrapper", [DistributedDataParallel, primitives.DistributedDataParallel], ids=["torchs", "ours"]
)
MATRICES = [(4, 6), (5,), (6, 4)]


def residual(state):
    return state.residuals.state_dict()


def quarter(module):
    return TopKState(module, ratio=0.25), top_k


def rank_one(module):
    return PowerSGDState(module, start_step=0, min_compression=1.0), power_sgd


def rank_two_later(module):
    return PowerSGDState(module, rank=2, start_step=3, min_compression=1.0), power_sgd


class Given(nn.Module):
    """A model whose parameters get the gradients that forward receives; None leaves a parameter unused."""

    def __init__(self, shapes, dtype=torch.float64) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes])

    def forward(self, *grads):
        parts = [(p * g).sum() for p, g in zip(self.weights, grads, strict=True) if g is not None]
        return torch.stack(parts).sum()


def applied(
    make_hook,
    grads,
    *,
    wrapper=DistributedDataParallel,
    bucket_bytes=64,
    dtype=torch.float64,
    unused=False,
    between=None,
):
    """Return this rank's gradients after each step, and the hook's state; ``grads[rank][step][parameter]``."""
    mine = grads[dist.get_rank()]
    everything = [step for rank in grads for step in rank]
    shapes = [next(g.shape for g in column if g is not None) for column in zip(*everything, strict=True)]
    model = Given(shapes, dtype)
    ddp = wrapper(model, bucket_cap_mb=bucket_bytes / 2**20, find_unused_parameters=unused)
    state, hook = make_hook(model)
    ddp.register_comm_hook(state, hook)
    found = []
    for number, step in enumerate(mine):
        model.zero_grad()
        ddp(*step).backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.weights])
        if between:
            between(number, state)
    return found, state


def drawn(world_size, steps, shapes, *, seed=0, dtype=torch.float64):
    """Draw multiples of one sixteenth, so that sums are exact."""
    draws = torch.Generator().manual_seed(seed)
    return [
        [[(torch.randn(s, generator=draws) * 16).round().to(dtype) / 16 for s in shapes] for _ in range(steps)]
        for _ in range(world_size)
    ]


def mean(grads, step, place):
    return sum(rank[step][place] for rank in grads) / len(grads)
