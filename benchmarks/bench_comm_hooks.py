"""A step of torch's DDP under each communication hook: ours, torch's own, and none.

The ways take turns, step by step, on models with the same weights and data. A row states the slowest rank's median
step in the best round. torch's PowerSGD is waited for bucket by bucket, else it hangs (docs/findings/powersgd.md).
On loopback of one machine a byte costs little: what compression computes is not won back there.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.bench import slowest_s
from pdlcheck.primitives import PowerSGDState, TopKState, fp16_compress, power_sgd, top_k
from pdlcheck.worlds import Ranks

WIDTHS = {"33MB": 1300, "1MB": 228}  # of five layers
WARM_UP = 4  # DDP makes its buckets anew, PowerSGD begins

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


def timed_steps(width: int, steps: int) -> dict[str, list[float]]:
    """Seconds of every step on this rank."""
    torch.manual_seed(0)
    sides: dict[str, nn.Module] = {}
    for name in ["none", *HOOKS]:
        torch.manual_seed(0)
        model = nn.Sequential(*(part for _ in range(5) for part in (nn.Linear(width, width), nn.Tanh())))
        sides[name] = DistributedDataParallel(model, bucket_cap_mb=8)
        if name in HOOKS:
            sides[name].register_comm_hook(*HOOKS[name](model))
    torch.manual_seed(dist.get_rank())
    inputs = torch.randn(32, width)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for step in range(steps + WARM_UP):
        for name, side in sides.items():
            side.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            side(inputs).square().sum().backward()  # a mean would be too small for float16
            if step >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    exact = torch.cat([p.grad.flatten() for p in sides["none"].parameters() if p.grad is not None])
    for name in ("torch_fp16", "fp16"):
        found = torch.cat([p.grad.flatten() for p in sides[name].parameters() if p.grad is not None])
        assert (found - exact).norm() <= 1e-2 * exact.norm(), "a fast wrong answer does not count"
    return seconds


@pytest.mark.benchmark(group="communication hooks")
@pytest.mark.parametrize("model", WIDTHS)
def test_comm_hooks(benchmark: Any, ranks: Ranks, full: bool, model: str) -> None:
    rounds: list[list[dict[str, list[float]]]] = []
    steps = 20 if full else 5
    benchmark.pedantic(lambda: rounds.append(ranks.run(timed_steps, WIDTHS[model], steps)), rounds=3 if full else 2)
    medians = {n: min(slowest_s([seconds[n] for seconds in everyone]) for everyone in rounds) for n in rounds[0][0]}
    benchmark.extra_info |= {f"{name}_s": seconds for name, seconds in medians.items()}
    benchmark.extra_info |= {
        "world_size": ranks.world_size,
        "threads_per_rank": 1,
        "fp16_over_torchs": medians["fp16"] / medians["torch_fp16"],
        "power_sgd_over_torchs": medians["power_sgd"] / medians["torch_power_sgd"],
    }
    benchmark.extra_info["row"] = (
        f"communication hooks, {model}, {ranks.world_size} ranks, ms a step: "
        + ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in medians.items())
    )
