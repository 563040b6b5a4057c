"""A training step of DataParallel beside the plain module, and beside torch's on CUDA; and the memory of each worker.

The sides take turns, step by step, on models with the same weights and data. On CPU all workers share the cores: a row
shows what copying, cutting and threads cost there, not a speed-up.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import pytest
import torch
from torch import nn

from pdlcheck.primitives import DataParallel, memory_by_worker

WIDTHS = {"33MB": 1660, "1MB": 288}  # of three layers


def mlp(width: int) -> nn.Module:
    return nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(width, width), nn.Tanh())))


def timed_steps(sides: dict[str, nn.Module], inputs: torch.Tensor, steps: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    on_cuda = inputs.is_cuda
    for step in range(steps + 2):
        for name, side in sides.items():
            side.zero_grad()
            if on_cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            side(inputs).square().mean().backward()
            if on_cuda:
                torch.cuda.synchronize()
            if step > 1:  # two warm up
                seconds[name].append(time.perf_counter() - start)
    return seconds


@pytest.mark.benchmark(group="data parallel in one process")
@pytest.mark.parametrize("workers", [2, 4], ids="{}workers".format)
@pytest.mark.parametrize("model", WIDTHS)
def test_data_parallel(benchmark: Any, full: bool, model: str, workers: int) -> None:
    devices = torch.cuda.device_count()
    home = torch.device("cuda", 0) if devices else torch.device("cpu")
    torch.manual_seed(0)
    plain = mlp(WIDTHS[model]).to(home)
    ours = DataParallel(copy.deepcopy(plain), workers=workers)
    sides = {"plain": plain, "ours": ours}
    if devices >= workers:
        sides["ours"] = ours = DataParallel(copy.deepcopy(plain), list(range(workers)))
        sides["torchs"] = nn.DataParallel(copy.deepcopy(plain), list(range(workers)))
    inputs = torch.randn(128 * workers, WIDTHS[model], device=home)
    rounds: list[dict[str, list[float]]] = []
    steps = 20 if full else 5
    benchmark.pedantic(lambda: rounds.append(timed_steps(sides, inputs, steps)), rounds=3 if full else 2)
    medians = {name: min(statistics.median(seconds[name]) for seconds in rounds) for name in sides}
    gradients = [torch.cat([p.grad.flatten() for p in s.parameters() if p.grad is not None]) for s in sides.values()]
    for gradient in gradients[1:]:
        assert (gradient - gradients[0]).norm() <= 1e-4 * gradients[0].norm(), "a fast wrong answer does not count"
    memory = memory_by_worker(ours, lambda y: y.square().mean(), inputs)
    benchmark.extra_info |= {f"{name}_s": seconds for name, seconds in medians.items()}
    benchmark.extra_info |= {
        "workers": workers,
        "device": str(home),
        "batch": len(inputs),
        "ours_over_plain": medians["ours"] / medians["plain"],
        "bytes_by_worker": [worker.total for worker in memory],
        "activations_by_worker": [worker.activations for worker in memory],
        "skew": memory[0].total / statistics.mean(worker.total for worker in memory[1:]),
    }
    info = benchmark.extra_info
    info["row"] = (
        f"DataParallel, {model}, {workers} workers on {home}, ms a step: plain {medians['plain'] * 1e3:.1f}, "
        f"ours {medians['ours'] * 1e3:.1f}, ratio {info['ours_over_plain']:.2f}; bytes of the first worker over the "
        f"mean of the others {info['skew']:.2f}"
    )
