"""A training step with its gradients synchronised: parameter by parameter, in flat buckets (ours), by DDP.

The ways take turns, step by step, on models with the same weights and data. A row states the slowest rank's
median step in the best round. ``loop_model_s = none + tensors * all_reduce(mean bytes of a tensor)``, because
a message costs more than its bytes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.bench import slowest_s
from pdlcheck.primitives import broadcast_parameters, sync_gradients
from pdlcheck.worlds import Ranks

WIDTHS = {20: 256, 200: 30}  # tensors of the model: width of its layers


def loop(model: nn.Module) -> None:
    """One all_reduce for each parameter."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


WAYS: dict[str, Callable[[nn.Module], Any]] = {"none": lambda model: None, "loop": loop, "flat": sync_gradients}


def mlp(tensors: int) -> nn.Module:
    """A layer has two tensors."""
    width = WIDTHS[tensors]
    return nn.Sequential(*(m for _ in range(tensors // 2) for m in (nn.Linear(width, width), nn.Tanh())))


def timed_steps(tensors: int, steps: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of every step on this rank, and how far each way's gradients are from those of the loop."""
    torch.manual_seed(dist.get_rank())
    model = mlp(tensors)
    broadcast_parameters(model)
    inputs = torch.randn(64, WIDTHS[tensors])
    models: dict[str, nn.Module] = {name: copy.deepcopy(model) for name in [*WAYS, "ddp"]}
    called = models | {"ddp": DistributedDataParallel(models["ddp"], gradient_as_bucket_view=True)}
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    mean_tensor = torch.zeros(nbytes // 4 // tensors)
    seconds: dict[str, list[float]] = {name: [] for name in [*models, "message"]}
    for step in range(steps + 2):
        for name in models:
            models[name].zero_grad()
            dist.barrier()
            start = time.perf_counter()
            called[name](inputs).square().mean().backward()
            WAYS.get(name, WAYS["none"])(models[name])
            if step > 1:  # two warm up: DDP makes its buckets anew after the first
                seconds[name].append(time.perf_counter() - start)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(mean_tensor)
        if step > 1:
            seconds["message"].append(time.perf_counter() - start)
    expected = gradient(models["loop"])
    off = {name: float((gradient(models[name]) - expected).norm() / expected.norm()) for name in ("flat", "ddp")}
    return seconds, off


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.benchmark(group="gradient sync")
@pytest.mark.parametrize("tensors", WIDTHS, ids="{}tensors".format)
def test_gradient_sync(benchmark: Any, ranks: Ranks, full: bool, tensors: int) -> None:
    rounds: list[list[tuple[dict[str, list[float]], dict[str, float]]]] = []
    steps = 30 if full else 6
    benchmark.pedantic(lambda: rounds.append(ranks.run(timed_steps, tensors, steps)), rounds=3 if full else 2)
    names = rounds[0][0][0]
    medians = {n: min(slowest_s([seconds[n] for seconds, _ in everyone]) for everyone in rounds) for n in names}
    for everyone in rounds:
        for _, off in everyone:
            assert max(off.values()) < 1e-5, "a fast wrong answer does not count"  # float32 sums of two terms
    benchmark.extra_info |= {f"{name}_s": seconds for name, seconds in medians.items()}
    benchmark.extra_info |= {
        "tensors": tensors,
        "world_size": ranks.world_size,
        "threads_per_rank": 1,
        "steps": steps,
        "loop_model_s": medians["none"] + tensors * medians["message"],
    }
    benchmark.extra_info["row"] = (
        f"gradient sync of {tensors:>3} tensors, {ranks.world_size} ranks, ms a step: "
        + ", ".join(f"{name} {medians[name] * 1e3:.1f}" for name in ("none", "loop", "flat", "ddp"))
        + f"; loop / flat {medians['loop'] / medians['flat']:.1f}, flat / ddp {medians['flat'] / medians['ddp']:.2f}"
    )


def broadcasts(model: nn.Module) -> None:
    """One broadcast for each tensor."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), 0)


def timed_starts(tensors: int, turns: int) -> dict[str, list[float]]:
    """Seconds until every rank has the first one's weights."""
    torch.manual_seed(dist.get_rank())
    ways: dict[str, Callable[[nn.Module], Any]] = {"loop": broadcasts, "flat": broadcast_parameters}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            model = mlp(tensors)
            dist.barrier()
            start = time.perf_counter()
            way(model)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


@pytest.mark.benchmark(group="initial weights")
@pytest.mark.parametrize("tensors", WIDTHS, ids="{}tensors".format)
def test_initial_weights(benchmark: Any, ranks: Ranks, full: bool, tensors: int) -> None:
    found: list[dict[str, list[float]]] = []
    benchmark.pedantic(lambda: found.extend(ranks.run(timed_starts, tensors, 20 if full else 6)), rounds=1)
    medians = {name: slowest_s([rank[name] for rank in found]) for name in ("loop", "flat")}
    benchmark.extra_info |= {f"{name}_s": seconds for name, seconds in medians.items()}
    benchmark.extra_info |= {"tensors": tensors, "world_size": ranks.world_size}
    benchmark.extra_info["row"] = (
        f"initial weights of {tensors:>3} tensors, {ranks.world_size} ranks, ms: loop of broadcasts "
        f"{medians['loop'] * 1e3:.1f}, broadcast_parameters {medians['flat'] * 1e3:.1f}, "
        f"ratio {medians['loop'] / medians['flat']:.1f}"
    )
