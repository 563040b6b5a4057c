"""A step of torch's DDP under each communication hook: ours, torch's own, and none.

The ways take turns, step by step, on models with the same weights and data. The benchmark waits for torch's PowerSGD
bucket by bucket, else it hangs (docs/findings/powersgd.md). On the loopback of one machine a byte costs little, so the
time spent on compression is not saved on messages there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.primitives import PowerSGDState, TopKState, fp16_compress, power_sgd, top_k

pytestmark = pytest.mark.between_ranks

WIDTHS = {"33MB": 1300, "1MB": 228}  # width of five layers

Made = tuple[Any, Callable[..., Any]]


def waited(state: Any, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations
    future = torchs.powerSGD_hook(state, bucket)
    future.wait()
    return future


def torchs_state(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torchs.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)


HOOKS: dict[str, Callable[[nn.Module], Made]] = {
    "torch_fp16": lambda model: (None, default_hooks.fp16_compress_hook),
    "fp16": lambda model: (None, fp16_compress),
    "top_k": lambda model: (TopKState(model, ratio=0.01), top_k),
    "torch_power_sgd": lambda model: (torchs_state(model), waited),
    "power_sgd": lambda model: (PowerSGDState(model, rank=2, start_step=2), power_sgd),
}


@pytest.mark.benchmark(group="communication hooks")
@pytest.mark.parametrize("model", ["1MB", pytest.param("33MB", marks=pytest.mark.full)])
def test_comm_hooks(rank_benchmark: Any, device: torch.device, rank: int, model: str) -> None:
    width, sides = WIDTHS[model], {}
    for name in ["none", *HOOKS]:
        torch.manual_seed(0)
        layers = nn.Sequential(*(part for _ in range(5) for part in (nn.Linear(width, width), nn.Tanh()))).to(device)
        sides[name] = DistributedDataParallel(layers, bucket_cap_mb=8)
        if name in HOOKS:
            sides[name].register_comm_hook(*HOOKS[name](layers))
    torch.manual_seed(rank)
    inputs = torch.randn(32, width).to(device)

    def step(name: str) -> None:
        sides[name].zero_grad()
        sides[name](inputs).square().sum().backward()  # a mean would be too small for float16

    others = {name: partial(step, name) for name in HOOKS}
    rank_benchmark(partial(step, "none"), against=others, iterations=1)
    exact = gradient(sides["none"])
    for name in ("torch_fp16", "fp16"):
        assert (gradient(sides[name]) - exact).norm() <= 1e-2 * exact.norm(), "a fast wrong answer does not count"


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
