"""What clipping over ranks and a scaler that agrees cost beside torch's own, and what half precision saves.

Both sides take turns, step by step, on gradients of the same sizes. ``clip_s`` and ``torch_clip_s`` are the slowest
rank's medians of a clip that is active, on gradients that every rank holds; ``step_s`` and ``torch_step_s`` those of
unscaling, a step of SGD and the update of the scale. Ours sends one message for each; torch's sends none, and sees its
own rank alone; so does ``clip_unasked_s``, with ``agree=False``. ``saved_ratio = half_bytes / full_bytes``: bytes of
activations kept for backward, counted not timed.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.bench import slowest_s
from pdlcheck.primitives import ConvNet, DistributedGradScaler, LeNet, clip_grad_norm, saved_activation_bytes
from pdlcheck.worlds import Ranks

WIDTHS = {20: 256, 200: 30}  # tensors of the model: width of its layers


def timed_steps(tensors: int, steps: int) -> dict[str, list[float]]:
    """Seconds on this rank of each way to clip, and to step under a scaler."""
    width = WIDTHS[tensors]
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(tensors // 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    scalers = {"step": DistributedGradScaler("cpu"), "torch_step": torch.amp.GradScaler("cpu")}
    ways = {
        "clip": lambda: clip_grad_norm(model, 1.0),
        "clip_unasked": lambda: clip_grad_norm(model, 1.0, agree=False),
        "torch_clip": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        **{name: lambda scaler=scaler: (scaler.step(optimizer), scaler.update()) for name, scaler in scalers.items()},
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(steps + 2):
        for name, way in ways.items():
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.5)
            if name in scalers:
                scalers[name].scale(torch.zeros(()))
            dist.barrier()
            start = time.perf_counter()
            way()
            if step > 1:
                seconds[name].append(time.perf_counter() - start)
    return seconds


@pytest.mark.benchmark(group="clipping and scaling")
@pytest.mark.parametrize("tensors", WIDTHS, ids="{}tensors".format)
def test_clipping_and_scaling(benchmark: Any, ranks: Ranks, full: bool, tensors: int) -> None:
    rounds: list[list[dict[str, list[float]]]] = []
    steps = 100 if full else 30
    benchmark.pedantic(lambda: rounds.append(ranks.run(timed_steps, tensors, steps)), rounds=3 if full else 2)
    names = rounds[0][0]
    medians = {n: min(slowest_s([seconds[n] for seconds in everyone]) for everyone in rounds) for n in names}
    benchmark.extra_info |= {f"{name}_s": seconds for name, seconds in medians.items()}
    benchmark.extra_info |= {"tensors": tensors, "world_size": ranks.world_size, "threads_per_rank": 1, "steps": steps}
    benchmark.extra_info["row"] = (
        f"{tensors} tensors, {ranks.world_size} ranks, ms: "
        + ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in medians.items())
    )


@pytest.mark.benchmark(group="saved activations")
@pytest.mark.parametrize("net", [LeNet, ConvNet])
def test_saved_activations(benchmark: Any, net: type[nn.Module]) -> None:
    """The rest above one half: the images, the softmax in float32, and indices of max pooling, 8 bytes each."""
    model, images = net(), torch.rand(256, 1, 8, 8)

    def kept(half: bool) -> int:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return saved_activation_bytes(model, lambda: model(images))

    full_bytes, half_bytes = benchmark.pedantic(lambda: (kept(False), kept(True)), rounds=1)
    assert half_bytes < 0.65 * full_bytes
    benchmark.extra_info |= {
        "full_bytes": full_bytes,
        "half_bytes": half_bytes,
        "saved_ratio": half_bytes / full_bytes,
    }
    benchmark.extra_info["row"] = (
        f"saved activations of {net.__name__}: {full_bytes} bytes, under autocast {half_bytes}, "
        f"ratio {half_bytes / full_bytes:.2f}"
    )
