"""A training step with its gradients synchronised: parameter by parameter, coalesced, in flat buckets (ours), by DDP.

The ways take turns, step by step, on models with the same weights and data. ``none`` is the step alone, ``message`` one
all_reduce of a tensor of mean size: ``loop = none + tensors * message``, because a message costs more than its bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.primitives import broadcast_parameters, sync_gradients

pytestmark = pytest.mark.between_ranks

WIDTHS = {20: 256, 200: 30}  # number of tensors of the model: width of its layers


def loop(model: nn.Module) -> None:
    """Call one all_reduce for each parameter."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def coalesced(model: nn.Module) -> None:
    """Make one call of torch for all parameters."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    dist.all_reduce_coalesced(gradients)
    for gradient in gradients:
        gradient /= dist.get_world_size()


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "flat": sync_gradients,
    "none": lambda model: None,
    "loop": loop,
    "coalesced": coalesced,
}


def mlp(tensors: int) -> nn.Module:
    """Return a perceptron; a layer has two tensors."""
    width = WIDTHS[tensors]
    return nn.Sequential(*(m for _ in range(tensors // 2) for m in (nn.Linear(width, width), nn.Tanh())))


@pytest.mark.benchmark(group="gradient sync")
@pytest.mark.parametrize("tensors", WIDTHS, ids="{}tensors".format)
@pytest.mark.filterwarnings("ignore:.*all_reduce_coalesced:FutureWarning")
def test_gradient_sync(rank_benchmark: Any, device: torch.device, rank: int, world_size: int, tensors: int) -> None:
    model = mlp(tensors).to(device)
    broadcast_parameters(model)
    torch.manual_seed(rank)
    inputs = torch.randn(64, WIDTHS[tensors]).to(device)
    models: dict[str, nn.Module] = {name: copy.deepcopy(model) for name in [*WAYS, "ddp"]}
    called = models | {"ddp": DistributedDataParallel(models["ddp"], gradient_as_bucket_view=True)}
    mean_tensor = torch.zeros(sum(p.numel() for p in model.parameters()) // tensors, device=device)

    def step(name: str) -> None:
        models[name].zero_grad()
        called[name](inputs).square().mean().backward()
        WAYS.get(name, WAYS["none"])(models[name])

    others = {name: partial(step, name) for name in models if name != "flat"}
    others["message"] = lambda: dist.all_reduce(mean_tensor)
    rank_benchmark(partial(step, "flat"), against=others, iterations=1, facts={"parts": ["none", "message"]})
    expected = gradient(models["loop"])
    for name in ("flat", "coalesced", "ddp"):
        off = float((gradient(models[name]) - expected).norm() / expected.norm())
        assert off < 1e-5, f"a fast wrong answer does not count: {name} is off by {off}"  # sums in float32


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def broadcasts(model: nn.Module) -> None:
    """Call one broadcast for each tensor."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), 0)


@pytest.mark.benchmark(group="initial weights")
@pytest.mark.parametrize("tensors", [200, pytest.param(20, marks=pytest.mark.full)], ids="{}tensors".format)
def test_initial_weights(rank_benchmark: Any, device: torch.device, rank: int, tensors: int) -> None:
    torch.manual_seed(rank)
    model = mlp(tensors).to(device)
    rank_benchmark(broadcast_parameters, model, against={"loop": broadcasts})
