"""Epochs of the function network: our loops against a minimal loop, and gradients synchronised every k-th step.

The ways take turns in one run. ``T(k) = T0 + Ts / k`` is fitted to k = 1, 2, 4, 10, never by
:mod:`pdlcheck.bench.experiments`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.primitives import (
    FunctionNet,
    broadcast_parameters,
    function_samples,
    sync_gradients,
    train_local_sgd,
    train_synchronous,
)

BATCH = 1000
EPOCHS = 1  # of one sample, including the start of the replicas
EVERY = (1, 2, 4, 10, None)
MSE = nn.MSELoss()
SGD = functools.partial(torch.optim.SGD, lr=0.01)
Data = tuple[Tensor, Tensor]


def floor(data: Data) -> None:
    """Do only the arithmetic: slices of the data in their order, without losses and other ranks."""
    model = FunctionNet().to(data[0].device)
    optimizer = SGD(model.parameters())
    for _ in range(EPOCHS):
        for start in range(0, len(data[0]), BATCH):
            optimizer.zero_grad()
            MSE(model(data[0][start : start + BATCH]), data[1][start : start + BATCH]).backward()
            optimizer.step()


def synchronous(data: Data) -> None:
    model = FunctionNet().to(data[0].device)
    train_synchronous(model, MSE, data, optimizer=SGD, epochs=EPOCHS, global_batch=BATCH)


def local(data: Data) -> None:
    model = FunctionNet().to(data[0].device)
    train_local_sgd(model, MSE, data, optimizer=SGD, epochs=EPOCHS, global_batch=BATCH, sync_every=4)


@pytest.mark.world_size(1)
@pytest.mark.benchmark(group="epoch of the function network")
def test_epoch_against_the_floor(rank_benchmark: Any, device: torch.device) -> None:
    data = tuple(part.to(device) for part in function_samples())
    others = {"floor": floor, "local": local}
    rank_benchmark(synchronous, data, against=others, iterations=1, facts={"parts": ["floor"]})


def naive(model: nn.Module, sync_every: int | None, step: int) -> None:
    """Call one all_reduce for each parameter."""
    if sync_every is not None and (step + 1) % sync_every == 0:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def flat(model: nn.Module, sync_every: int | None, step: int) -> None:
    sync_gradients(model, sync_every=sync_every, step=step)


@pytest.mark.between_ranks
@pytest.mark.benchmark(group="gradients every k-th step")
@pytest.mark.parametrize("sync", [naive, flat], ids=["naive", "flat"])
def test_sync_every(
    rank_benchmark: Any,
    device: torch.device,
    rank: int,
    world_size: int,
    sync: Callable[[nn.Module, int | None, int], None],
) -> None:
    """Time an epoch in which every rank has its part of the samples, with batches of 1000 on each."""
    inputs, targets = (part.tensor_split(world_size)[rank].to(device) for part in function_samples())
    batches = list(zip(inputs.split(BATCH), targets.split(BATCH), strict=True))
    models = {k: FunctionNet().to(device) for k in EVERY}
    optimizers = {}
    for k, model in models.items():
        broadcast_parameters(model)
        optimizers[k] = SGD(model.parameters())

    def epoch(k: int | None) -> None:
        for step, (x, y) in enumerate(batches):
            optimizers[k].zero_grad()
            MSE(models[k](x), y).backward()
            sync(models[k], k, step)
            optimizers[k].step()

    first, *others = EVERY
    names = {k: "never" if k is None else f"every {k}" for k in others}
    rank_benchmark(
        functools.partial(epoch, first),
        against={name: functools.partial(epoch, k) for k, name in names.items()},
        iterations=1,
        facts={"parts": [*names.values()]},
    )
