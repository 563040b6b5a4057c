"""A training step of our DistributedDataParallel beside torch's, tuned, and beside the same step without sync.

Both wrap models with the same weights and take turns, step by step, on the same data.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from pdlcheck.primitives import ConvNet, LeNet
from pdlcheck.primitives.data_parallel import DistributedDataParallel
from pdlcheck.primitives.digits import digits

MODELS = {"mlp8": (8, 64), "mlp20": (20, 256), "mlp200": (200, 30), "mlp33MB": (16, 1024)}  # tensors, width of a layer
TUNED = {"gradient_as_bucket_view": True, "static_graph": True}


def mlp(tensors: int, width: int) -> nn.Module:
    """Return a perceptron; a layer has two tensors."""
    return nn.Sequential(*(m for _ in range(tensors // 2) for m in (nn.Linear(width, width), nn.Tanh())))


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.benchmark(group="data parallel")
@pytest.mark.parametrize("model", ["mlp8", pytest.param("mlp20", marks=pytest.mark.full), "mlp200", "mlp33MB"])
def test_distributed_data_parallel(rank_benchmark: Any, device: torch.device, rank: int, model: str) -> None:
    tensors, width = MODELS[model]
    torch.manual_seed(0)
    plain = mlp(tensors, width).to(device)
    models = {name: copy.deepcopy(plain) for name in ("none", "torch", "ours")}
    called = {
        "none": models["none"],
        "torch": TorchDistributedDataParallel(models["torch"], **TUNED),
        "ours": DistributedDataParallel(models["ours"], **TUNED),
    }
    torch.manual_seed(rank)
    inputs = torch.randn(64, width).to(device)

    def step(name: str) -> None:
        models[name].zero_grad()
        called[name](inputs).square().mean().backward()

    others = {name: partial(step, name) for name in ("torch", "none")}
    rank_benchmark(partial(step, "ours"), against=others, iterations=1, facts={"parts": ["none"]})
    expected = gradient(models["torch"])
    assert (gradient(models["ours"]) - expected).norm() < 1e-5 * expected.norm(), "a fast wrong answer does not count"


@pytest.mark.benchmark(group="networks on digits")
@pytest.mark.parametrize("name", ["LeNet", pytest.param("ConvNet", marks=pytest.mark.full)])
def test_networks_on_digits(rank_benchmark: Any, device: torch.device, rank: int, name: str) -> None:
    """Time a step of SGD on 64 images a rank."""
    torch.manual_seed(0)
    network = {"LeNet": LeNet, "ConvNet": ConvNet}[name]().to(device)
    models = {
        "torch": TorchDistributedDataParallel(copy.deepcopy(network), **TUNED),
        "ours": DistributedDataParallel(copy.deepcopy(network), **TUNED),
    }
    images, labels = (part[64 * rank : 64 * rank + 64].to(device) for part in digits())
    optimizers = {way: torch.optim.SGD(model.parameters(), lr=0.1) for way, model in models.items()}

    def step(way: str) -> None:
        optimizers[way].zero_grad()
        nn.functional.cross_entropy(models[way](images), labels).backward()
        optimizers[way].step()

    rank_benchmark(partial(step, "ours"), against={"torch": partial(step, "torch")}, iterations=1)
