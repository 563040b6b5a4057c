"""A training step of DataParallel beside the plain module, and beside torch's on CUDA; and the memory of each worker.

On CPU all workers share the cores, so a row shows the cost of copying, splitting and threads, not a speed-up.
"""

from __future__ import annotations

import copy
import statistics
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pdlcheck.primitives import DataParallel, memory_by_worker

WIDTHS = {"33MB": 1660, "1MB": 288}  # width of three layers

pytestmark = pytest.mark.world_size(1)


def mlp(width: int) -> nn.Module:
    return nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(width, width), nn.Tanh())))


@pytest.mark.benchmark(group="data parallel in one process")
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.full)], ids="{}workers".format)
@pytest.mark.parametrize("model", ["1MB", pytest.param("33MB", marks=pytest.mark.full)])
def test_data_parallel(rank_benchmark: Any, device: torch.device, model: str, workers: int) -> None:
    torch.manual_seed(0)
    plain = mlp(WIDTHS[model]).to(device)
    ours = DataParallel(copy.deepcopy(plain), workers=workers)
    sides = {"ours": ours, "plain": plain}
    if device.type == "cuda" and torch.cuda.device_count() >= workers:
        sides["ours"] = ours = DataParallel(copy.deepcopy(plain), list(range(workers)))
        sides["torch"] = nn.DataParallel(copy.deepcopy(plain), list(range(workers)))
    inputs = torch.randn(128 * workers, WIDTHS[model], device=device)
    memory = memory_by_worker(ours, lambda y: y.square().mean(), inputs)
    skew = memory[0].total / statistics.mean(worker.total for worker in memory[1:])

    def step(name: str) -> None:
        sides[name].zero_grad()
        sides[name](inputs).square().mean().backward()

    others = {name: partial(step, name) for name in sides if name != "ours"}
    rank_benchmark(partial(step, "ours"), against=others, iterations=1, facts={"first_worker_bytes_over_others": skew})
    gradients = [torch.cat([p.grad.flatten() for p in s.parameters() if p.grad is not None]) for s in sides.values()]
    for gradient in gradients[1:]:
        assert (gradient - gradients[0]).norm() <= 1e-4 * gradients[0].norm(), "a fast wrong answer does not count"
