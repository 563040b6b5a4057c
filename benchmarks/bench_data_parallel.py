"""A training step of our DistributedDataParallel beside torch's, tuned, and beside the same step without sync.

Both wrap models with the same weights and take turns, step by step, on the same data; who goes first changes with
every step. A row states the slowest rank's median step in the best round, and ``over_torch``: of all rounds together,
the ratio of the medians of ours and torch's. ``mpi`` rows compare our wrapper on the two backends, which take turns
call by call.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from pdlcheck.bench import slowest_s
from pdlcheck.errors import WorldUnavailable
from pdlcheck.primitives import ConvNet, LeNet
from pdlcheck.primitives.data_parallel import DistributedDataParallel
from pdlcheck.primitives.digits import digits
from pdlcheck.worlds import Ranks, get_world

MODELS = {"mlp20": (20, 256), "mlp200": (200, 30), "mlp33MB": (16, 1024)}  # tensors, width of the layers
TUNED = {"gradient_as_bucket_view": True, "static_graph": True}
SMALL = (8, 64)  # the MLP on mpi and gloo


def mlp(tensors: int, width: int) -> nn.Module:
    """A layer has two tensors."""
    return nn.Sequential(*(m for _ in range(tensors // 2) for m in (nn.Linear(width, width), nn.Tanh())))


def timed_steps(tensors: int, width: int, steps: int, device: str = "cpu") -> tuple[dict[str, list[float]], float]:
    """Seconds of every step on this rank, and how far our gradients are from torch's."""
    torch.manual_seed(0)
    model = mlp(tensors, width).to(device)
    models = {name: copy.deepcopy(model) for name in ("none", "torch", "ours")}
    called = {
        "none": models["none"],
        "torch": TorchDistributedDataParallel(models["torch"], **TUNED),
        "ours": DistributedDataParallel(models["ours"], **TUNED),
    }
    torch.manual_seed(dist.get_rank())
    inputs = torch.randn(64, width).to(device)
    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else int
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for step in range(-3, steps):  # three warm up: buckets are made anew after the first
        for name in ("none", *(("torch", "ours") if step % 2 else ("ours", "torch"))):
            models[name].zero_grad()
            dist.barrier()
            wait()
            start = time.perf_counter()
            called[name](inputs).square().mean().backward()
            wait()
            if step >= 0:
                seconds[name].append(time.perf_counter() - start)
    expected = gradient(models["torch"])
    return seconds, float((gradient(models["ours"]) - expected).norm() / expected.norm())


def timed_small_steps(steps: int) -> list[float]:
    """Seconds of every step of a small MLP on this rank."""
    torch.manual_seed(dist.get_rank())
    ddp = DistributedDataParallel(mlp(*SMALL), **TUNED)
    inputs = torch.randn(16, SMALL[1])
    seconds = []
    for step in range(-3, steps):
        ddp.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        ddp(inputs).square().mean().backward()
        if step >= 0:
            seconds.append(time.perf_counter() - start)
    return seconds


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.benchmark(group="data parallel")
@pytest.mark.parametrize("model", MODELS)
def test_distributed_data_parallel(benchmark: Any, ranks: Ranks, full: bool, model: str) -> None:
    compare(benchmark, ranks, full, model)


@pytest.mark.gpu
@pytest.mark.benchmark(group="data parallel")
@pytest.mark.parametrize(("backend", "world_size"), [("nccl", 1), ("gloo", 2)], ids=["nccl", "shared"])
@pytest.mark.parametrize("model", MODELS)
def test_distributed_data_parallel_on_cuda(
    benchmark: Any, full: bool, model: str, backend: str, world_size: int
) -> None:
    """nccl with the one device that every GPU machine has, and two ranks of gloo that share it."""
    world = get_world(backend, device="cuda", watch=False, threads_per_rank=1, timeout_s=600)
    try:
        with world.open(world_size) as ranks:
            compare(benchmark, ranks, full, model, on_cuda=backend)
    finally:
        world.close()


def compare(benchmark: Any, ranks: Ranks, full: bool, model: str, on_cuda: str = "") -> None:
    """``on_cuda``: the backend, where tensors are on CUDA devices."""
    device = "cuda" if on_cuda else "cpu"
    rounds: list[list[tuple[dict[str, list[float]], float]]] = []
    steps = (20 if model == "mlp33MB" else 100) if full else 6
    run = functools.partial(ranks.run, timed_steps, *MODELS[model], steps, device)
    benchmark.pedantic(lambda: rounds.append(run()), rounds=5 if full else 2)
    assert all(off < 1e-5 for everyone in rounds for _, off in everyone), "a fast wrong answer does not count"
    names = rounds[0][0][0]
    best = {n: min(slowest_s([seconds[n] for seconds, _ in everyone]) for everyone in rounds) for n in names}
    # a rank's steps of all rounds are one sample
    pooled = {
        n: slowest_s([[s for everyone in rounds for s in everyone[rank][0][n]] for rank in range(ranks.world_size)])
        for n in names
    }
    benchmark.extra_info |= {f"{name}_s": seconds for name, seconds in best.items()}
    benchmark.extra_info |= {
        "model": model,
        "world_size": ranks.world_size,
        "threads_per_rank": 1,
        "device": device,
        "steps": steps,
        "over_torch": pooled["ours"] / pooled["torch"],
    }
    on = f" of {on_cuda} on {torch.cuda.get_device_name()}" if on_cuda else ""
    benchmark.extra_info["row"] = (
        f"distributed data parallel, {model}, {ranks.world_size} ranks{on}, ms a step: "
        + ", ".join(f"{name} {best[name] * 1e3:.{2 if on_cuda else 1}f}" for name in ("none", "torch", "ours"))
        + f"; ours / torch's {pooled['ours'] / pooled['torch']:.3f}"
    )


@pytest.mark.benchmark(group="data parallel")
def test_distributed_data_parallel_on_mpi_and_gloo(benchmark: Any, full: bool) -> None:
    worlds = {name: get_world(name, watch=False, threads_per_rank=1, timeout_s=600) for name in ("gloo", "mpi")}
    try:
        with worlds["gloo"].open(2) as on_gloo, worlds["mpi"].open(2) as on_mpi:
            found: dict[str, list[list[float]]] = {"gloo": [[], []], "mpi": [[], []]}

            def turn() -> None:
                for name, ranks in (("gloo", on_gloo), ("mpi", on_mpi)):
                    for kept, seconds in zip(found[name], ranks.run(timed_small_steps, 20), strict=True):
                        kept += seconds

            benchmark.pedantic(turn, rounds=20 if full else 3)
    except WorldUnavailable as missing:
        pytest.skip(str(missing))
    finally:
        for world in worlds.values():
            world.close()
    medians = {name: slowest_s(kept) for name, kept in found.items()}
    benchmark.extra_info |= {f"{name}_s": seconds for name, seconds in medians.items()}
    benchmark.extra_info |= {"world_size": 2, "threads_per_rank": 1, "gloo_over_mpi": medians["gloo"] / medians["mpi"]}
    benchmark.extra_info["row"] = (
        f"distributed data parallel, small MLP, 2 ranks, ms a step: gloo {medians['gloo'] * 1e3:.2f}, "
        f"mpi {medians['mpi'] * 1e3:.2f}, ratio {medians['gloo'] / medians['mpi']:.1f}"
    )


def timed_networks(name: str, steps: int) -> dict[str, list[float]]:
    """Seconds of every step on 64 images a rank, with our wrapper and with torch's."""
    torch.manual_seed(0)
    network = {"LeNet": LeNet, "ConvNet": ConvNet}[name]()
    models = {
        "torch": TorchDistributedDataParallel(copy.deepcopy(network), **TUNED),
        "ours": DistributedDataParallel(copy.deepcopy(network), **TUNED),
    }
    images, labels = digits()
    first = 64 * dist.get_rank()
    images, labels = images[first : first + 64], labels[first : first + 64]
    optimizers = {way: torch.optim.SGD(model.parameters(), lr=0.1) for way, model in models.items()}
    seconds: dict[str, list[float]] = {way: [] for way in models}
    for step in range(-3, steps):
        for way in ("torch", "ours") if step % 2 else ("ours", "torch"):
            dist.barrier()
            start = time.perf_counter()
            optimizers[way].zero_grad()
            nn.functional.cross_entropy(models[way](images), labels).backward()
            optimizers[way].step()
            if step >= 0:
                seconds[way].append(time.perf_counter() - start)
    return seconds


@pytest.mark.benchmark(group="networks on digits")
@pytest.mark.parametrize("name", ["LeNet", "ConvNet"])
def test_networks_on_digits(benchmark: Any, ranks: Ranks, full: bool, name: str) -> None:
    found: list[dict[str, list[float]]] = []
    benchmark.pedantic(lambda: found.extend(ranks.run(timed_networks, name, 100 if full else 30)), rounds=1)
    middle = {way: slowest_s([rank[way] for rank in found]) for way in ("ours", "torch")}
    benchmark.extra_info |= {f"{way}_s": value for way, value in middle.items()} | {"world_size": ranks.world_size}
    benchmark.extra_info["row"] = (
        f"{name} on digits, DDP, {ranks.world_size} ranks with 64 images each, ms a step: torch "
        f"{middle['torch'] * 1e3:.1f}, ours {middle['ours'] * 1e3:.1f}, ratio {middle['ours'] / middle['torch']:.2f}"
    )
