"""The check of gradients on losses with weights of their own, and on models with layers of a fixed dtype."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from pdlcheck.checks import check_gradients_equal_single_process, check_replicated_module
from pdlcheck.primitives import DataParallel, sync_gradients

SIZES = (3, 1, 2)
DRAWN = torch.Generator().manual_seed(0)
SHARDS = [(torch.randn(n, 3, generator=DRAWN), torch.randint(4, (n,), generator=DRAWN)) for n in SIZES]


class Cosines(nn.Module):
    """A loss with a weight for each class and a temperature, both learned, as in ArcFace."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(1)))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, outputs, targets):
        cosines = F.linear(F.normalize(outputs), F.normalize(self.weight))
        return F.cross_entropy(cosines * self.temperature.exp(), targets)


def features():
    return nn.Linear(3, 3)


def mean(model, num_samples):
    sync_gradients(model, weight=num_samples)


def total(model, num_samples):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_weights_of_the_loss_are_in_the_dtype_of_the_model(world, dtype):
    check_gradients_equal_single_process(features, Cosines(), SHARDS, mean, world, dtype=dtype)
    with pytest.raises(AssertionError, match=r"likely cause +it is the plain sum over ranks"):
        check_gradients_equal_single_process(features, Cosines(), SHARDS, total, world, dtype=dtype)


def test_the_function_may_synchronise_the_loss_too(world):
    loss = Cosines()

    def both(model, num_samples):
        mean(model, num_samples)
        mean(loss, num_samples)

    check_gradients_equal_single_process(features, loss, SHARDS, both, world)


def test_the_loss_of_a_replicated_module_may_have_weights():
    targets = torch.arange(6) % 4
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 1.5, 2.0]))

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = weighted

        def forward(self, outputs):
            return self.inner(outputs, targets[: len(outputs)])

    def make():
        return nn.Linear(3, 4)

    check_replicated_module(
        lambda module, n: DataParallel(module, workers=n), make, lambda n: (torch.randn(n, 3),), loss=Loss()
    )
    assert weighted.weight.dtype == torch.float32


class Adapted(nn.Module):
    """A frozen layer in bfloat16 beside one that is trained."""

    def __init__(self, dtype=None):
        super().__init__()
        self.dtype = dtype
        self.base, self.adapter = nn.Linear(3, 3).bfloat16().requires_grad_(False), nn.Linear(3, 3)

    def forward(self, x):
        return self.base(x.to(self.dtype or self.base.weight.dtype)).to(x.dtype) + self.adapter(x)


def test_frozen_layers_of_a_narrow_dtype_are_widened(world):
    check_gradients_equal_single_process(Adapted, nn.CrossEntropyLoss(), _of_three(), mean, world)
    with pytest.raises(RuntimeError) as raised:
        check_gradients_equal_single_process(
            lambda: Adapted(torch.bfloat16), nn.CrossEntropyLoss(), _of_three(), mean, world
        )
    told = "the check casts the whole model to float64, frozen layers too, and the data: cast what else takes part to"
    assert any(told in note for note in raised.value.__notes__)


def _of_three():
    return [(x, y % 3) for x, y in SHARDS]
