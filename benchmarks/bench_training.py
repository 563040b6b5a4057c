"""Epochs of the function network: our loops against the barest one, and gradients synchronised every k-th step.

The ways take turns in one run. A row states medians of the slowest rank; a ratio is the median of the ratios of
neighbours. Ours and the floor train for 4 epochs at a time, the start of the replicas included.
``T(k) = T0 + Ts / k`` is fitted to k = 1, 2, 4, 10, never.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.bench import fit_local_sgd, slowest_s
from pdlcheck.primitives import (
    FunctionNet,
    broadcast_parameters,
    function_samples,
    sync_gradients,
    train_local_sgd,
    train_synchronous,
)
from pdlcheck.worlds import Ranks, get_world

BATCH = 1000
EPOCHS = 4
EVERY = (1, 2, 4, 10, None)
MSE = nn.MSELoss()
SGD = functools.partial(torch.optim.SGD, lr=0.01)
Data = tuple[Tensor, Tensor]


def floor(data: Data) -> None:
    """Nothing but the arithmetic: slices of the data in their order, no loss kept, nobody to talk to."""
    model = FunctionNet()
    optimizer = SGD(model.parameters())
    for _ in range(EPOCHS):
        for start in range(0, len(data[0]), BATCH):
            optimizer.zero_grad()
            MSE(model(data[0][start : start + BATCH]), data[1][start : start + BATCH]).backward()
            optimizer.step()


def synchronous(data: Data) -> None:
    train_synchronous(FunctionNet(), MSE, data, optimizer=SGD, epochs=EPOCHS, global_batch=BATCH)


def local(data: Data) -> None:
    train_local_sgd(FunctionNet(), MSE, data, optimizer=SGD, epochs=EPOCHS, global_batch=BATCH, sync_every=4)


WAYS: dict[str, Callable[[Data], None]] = {"floor": floor, "synchronous": synchronous, "local": local}


def timed_epochs(turns: int) -> dict[str, list[float]]:
    """Seconds of an epoch in each turn, the first turn left out."""
    data = function_samples()
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(turns + 1):
        for name, way in WAYS.items():
            start = time.perf_counter()
            way(data)
            if turn:
                seconds[name].append((time.perf_counter() - start) / EPOCHS)
    return seconds


def naive(model: nn.Module, sync_every: int | None, step: int) -> None:
    """One all_reduce for each parameter."""
    if sync_every is not None and (step + 1) % sync_every == 0:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def flat(model: nn.Module, sync_every: int | None, step: int) -> None:
    sync_gradients(model, sync_every=sync_every, step=step)


def timed_sync_every(epochs: int) -> dict[tuple[str, int | None], list[float]]:
    """Seconds of each epoch in which every rank has its part of the samples, batches of 1000 on each."""
    inputs, targets = (part.tensor_split(dist.get_world_size())[dist.get_rank()] for part in function_samples())
    syncs: dict[str, Callable[[nn.Module, int | None, int], None]] = {"naive": naive, "flat": flat}
    seconds: dict[tuple[str, int | None], list[float]] = {(name, k): [] for name in syncs for k in EVERY}
    for epoch in range(epochs + 1):
        for name, k in seconds:
            model = FunctionNet()
            broadcast_parameters(model)
            optimizer = SGD(model.parameters())
            dist.barrier()
            start = time.perf_counter()
            for step, (x, y) in enumerate(zip(inputs.split(BATCH), targets.split(BATCH), strict=True)):
                optimizer.zero_grad()
                MSE(model(x), y).backward()
                syncs[name](model, k, step)
                optimizer.step()
            if epoch:
                seconds[name, k].append(time.perf_counter() - start)
    return seconds


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    """One process with one thread."""
    world = get_world("gloo", watch=False, threads_per_rank=1, timeout_s=600)
    with world.open(1) as started:
        yield started
    world.close()


@pytest.mark.benchmark(group="epoch of the function network")
def test_epoch_against_the_floor(benchmark: Any, one_rank: Ranks, full: bool) -> None:
    turns = 20 if full else 5
    rounds: list[dict[str, list[float]]] = []
    benchmark.pedantic(lambda: rounds.append(one_rank.run(timed_epochs, turns)[0]), rounds=1)
    (seconds,) = rounds
    for name in ("synchronous", "local"):
        pairs = zip(seconds[name], seconds["floor"], strict=True)
        benchmark.extra_info[f"{name}_over_floor"] = statistics.median(ours / bare for ours, bare in pairs)
    benchmark.extra_info |= {f"{name}_epoch_s": statistics.median(times) for name, times in seconds.items()}
    benchmark.extra_info |= {"world_size": 1, "threads_per_rank": 1, "epochs": turns * EPOCHS}
    info = benchmark.extra_info
    info["row"] = (
        "epoch of the function network, 1 rank, ms: "
        + ", ".join(f"{name} {info[f'{name}_epoch_s'] * 1e3:.0f}" for name in ("floor", "synchronous", "local"))
        + f"; synchronous / floor {info['synchronous_over_floor']:.3f}, local / floor {info['local_over_floor']:.3f}"
    )


@pytest.mark.benchmark(group="gradients every k-th step")
def test_sync_every(benchmark: Any, ranks: Ranks, full: bool) -> None:
    epochs = 15 if full else 3
    rounds: list[list[dict[tuple[str, int | None], list[float]]]] = []
    benchmark.pedantic(lambda: rounds.append(ranks.run(timed_sync_every, epochs)), rounds=1)
    (everyone,) = rounds
    medians = {way: slowest_s([seconds[way] for seconds in everyone]) for way in everyone[0]}
    benchmark.extra_info |= {"world_size": ranks.world_size, "threads_per_rank": 1, "epochs": epochs}
    rows = []
    for name in ("naive", "flat"):
        of_k = {k: medians[name, k] for k in EVERY}
        t0, ts = fit_local_sgd(of_k)
        benchmark.extra_info[f"{name}_every_s"] = [of_k[k] for k in EVERY]
        benchmark.extra_info[f"{name}_fit_s"] = [t0, ts]
        benchmark.extra_info[f"{name}_worst_of_fit"] = max(
            abs(t0 + (ts / k if k else 0) - found) / found for k, found in of_k.items()
        )
        rows.append(
            f"{name} {' / '.join(f'{of_k[k] * 1e3:.0f}' for k in EVERY)} = {t0 * 1e3:.0f} + {ts * 1e3:.0f} / k "
            f"within {benchmark.extra_info[f'{name}_worst_of_fit']:.0%}"
        )
    benchmark.extra_info["row"] = (
        f"gradients every 1 / 2 / 4 / 10 / never, {ranks.world_size} ranks, ms an epoch: {'; '.join(rows)}"
    )
