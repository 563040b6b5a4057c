"""The cost of clipping over ranks and of a scaler that agrees, beside torch's own, and the savings of half precision.

Our clipping and our scaler send one message each. torch's send none and see only their own rank; so does
``agree=False``. ``saved_ratio = half_bytes / full_bytes``: bytes of activations kept for backward, counted and not
timed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pdlcheck.primitives import ConvNet, DistributedGradScaler, LeNet, clip_grad_norm, saved_activation_bytes

pytestmark = pytest.mark.between_ranks

WIDTHS = {20: 256, 200: 30}  # number of tensors of the model: width of its layers


@pytest.mark.benchmark(group="clipping")
@pytest.mark.parametrize("tensors", [200, pytest.param(20, marks=pytest.mark.full)], ids="{}tensors".format)
def test_clipping(rank_benchmark: Any, device: torch.device, tensors: int) -> None:
    """Time a clip that is active, on gradients that every rank holds."""
    model = layers(tensors, device)
    rank_benchmark(
        lambda: clip_grad_norm(model, 1.0),
        against={
            "agree=False": lambda: clip_grad_norm(model, 1.0, agree=False),
            "torch": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        },
        setup=lambda: fill(model),
    )


@pytest.mark.benchmark(group="scaling")
@pytest.mark.parametrize("tensors", [200, pytest.param(20, marks=pytest.mark.full)], ids="{}tensors".format)
def test_scaling(rank_benchmark: Any, device: torch.device, tensors: int) -> None:
    """Time unscaling, a step of SGD and the update of the scale."""
    model = layers(tensors, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    scalers = {"ours": DistributedGradScaler(device.type), "torch": torch.amp.GradScaler(device.type)}

    def step(name: str) -> None:
        scalers[name].step(optimizer)
        scalers[name].update()

    def setup() -> None:
        fill(model)
        for scaler in scalers.values():
            scaler.scale(torch.zeros((), device=device))

    rank_benchmark(lambda: step("ours"), against={"torch": lambda: step("torch")}, setup=setup)


def layers(tensors: int, device: torch.device) -> nn.Module:
    width = WIDTHS[tensors]
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(tensors // 2))).to(device)


def fill(model: nn.Module) -> None:
    """Give every parameter the same gradient."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)


@pytest.mark.benchmark(group="saved activations")
@pytest.mark.parametrize("net", [LeNet, ConvNet])
def test_saved_activations(benchmark: Any, net: type[nn.Module]) -> None:
    """Count the saved bytes.

    The part above one half is the images, the softmax in float32, and indices of max pooling with 8 bytes each.
    """
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
