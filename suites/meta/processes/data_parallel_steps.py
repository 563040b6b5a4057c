"""Steps of a data-parallel wrapper, torch's or ours, on a rank's device, beside one process on all samples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import parallel

from pdlcheck import primitives

SAMPLES = 3  # of a rank

WRAPPERS = pytest.mark.parametrize(
    "wrapper", [parallel.DistributedDataParallel, primitives.DistributedDataParallel], ids=["torch", "pdlcheck"]
)
OPTIONS = pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True}, {"find_unused_parameters": True}],
    ids=["default", "small buckets", "unused"],
)


def ddp_step(wrapper: Callable[..., nn.Module], device: str) -> tuple[list[list[float]], bool]:
    """Return a linear layer's gradient on ranks with different data, and whether the replicas are equal."""
    torch.manual_seed(0)
    model = wrapper(nn.Linear(3, 1, device=device), device_ids=_ids(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.full((2, 3), dist.get_rank() + 1.0, device=device)).sum().backward()
    optimizer.step()
    return model.module.weight.grad.tolist(), _replicas_are_equal(model)


def ddp_steps(wrapper: Callable[..., nn.Module], device: str, options: dict[str, Any]) -> tuple[float, bool]:
    """Return the distance of the weights from the plain model's, and whether the replicas are equal.

    There are three steps: a plain one, an accumulated one and another. Ranks start with other weights than rank 0; the
    wrapper must take those of rank 0. In the last step a layer is unused if the options allow it.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = _Branching().to(device, torch.float64)
    model = copy.deepcopy(plain)
    with torch.no_grad():
        model.first.weight += rank
    wrapped = wrapper(model, device_ids=_ids(device), **options)
    ours, expected = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, plain))
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        batches = [torch.rand(world_size, SAMPLES, 3, dtype=torch.float64, generator=generator) for _ in range(2)]
        branch = step < 2 or not options.get("find_unused_parameters", False)
        for optimizer in (ours, expected):
            optimizer.zero_grad()
        if step == 1:
            with wrapped.no_sync():
                wrapped(batches[0][rank].to(device), branch).square().mean().backward()
            plain(batches[0].flatten(0, 1).to(device), branch).square().mean().backward()
        wrapped(batches[1][rank].to(device), branch).square().mean().backward()
        plain(batches[1].flatten(0, 1).to(device), branch).square().mean().backward()
        for optimizer in (ours, expected):
            optimizer.step()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    away = max((one - other).abs().max().item() for one, other in pairs)
    return away, _replicas_are_equal(wrapped)


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden + torch.tanh(self.branch(hidden)) if branch else hidden)


def _ids(device: str) -> list[int] | None:
    """Return the ``device_ids`` of the wrapper for this rank's device."""
    return [torch.cuda.current_device()] if device == "cuda" else None


def _replicas_are_equal(model: nn.Module) -> bool:
    """Return whether the replicas are equal; a collective call."""
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    lowest, highest = weights.clone(), weights.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return torch.equal(lowest, highest)
