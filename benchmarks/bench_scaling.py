"""The scaling of a training step: strong and weak scaling by ranks, and processes beside threads.

Strong scaling: the global batch stays, and each rank has its part. Weak scaling: the batch of a rank stays.
Run them with several numbers of ranks, as in ``pdlcheck bench scaling --ranks 1,2,4``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pdlcheck.primitives import broadcast_parameters, sync_gradients

pytestmark = pytest.mark.from_one_rank

BATCH = 512  # of all ranks together (strong scaling), or of each rank (weak scaling)
WIDTH, LAYERS = 512, 4
STEPS = 4  # in one sample


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread in each rank, for any number of ranks: else a single rank would use the cores of all."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.benchmark(group="strong scaling")
def test_strong_scaling(
    rank_benchmark: Any, model: nn.Module, device: torch.device, world_size: int, one_thread: None
) -> None:
    rank_benchmark(steps, model, device, BATCH // world_size, True, iterations=1)


@pytest.mark.benchmark(group="weak scaling")
def test_weak_scaling(rank_benchmark: Any, model: nn.Module, device: torch.device, one_thread: None) -> None:
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    facts = {"steps": STEPS, "gradient_bytes": nbytes}
    rank_benchmark(steps, model, device, BATCH, True, iterations=1, facts=facts)


@pytest.mark.benchmark(group="processes and threads")
@pytest.mark.parametrize("threads", [1, 2], ids="{}threads".format)
def test_processes_and_threads(
    rank_benchmark: Any, model: nn.Module, device: torch.device, world_size: int, threads: int
) -> None:
    """Time the same total work without synchronisation, which shows the effect of cores and of too many threads."""
    if device.type != "cpu":
        pytest.skip("threads compute on the CPU")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rank_benchmark(steps, model, device, BATCH // world_size, False, iterations=1)
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def model(device: torch.device) -> nn.Module:
    """Return a perceptron that is the same on all ranks."""
    layers = (m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    made = nn.Sequential(*layers).to(device)
    broadcast_parameters(made)
    return made


def steps(model: nn.Module, device: torch.device, batch: int, synchronised: bool) -> None:
    """Take steps of SGD with the gradients averaged over the ranks, or not."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.ones(batch, WIDTH, device=device)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        if synchronised:
            sync_gradients(model)
        optimizer.step()
