"""Checks of trainings whose frozen layers are in bfloat16, beside adapters in float32."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_replicas_in_sync, check_resume, check_same_trajectory

DATA = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(0))


class Adapted(nn.Module):
    """A frozen layer, used twice, with an adapter; it casts to a fixed dtype, or to that of the layer."""

    def __init__(self, dtype=None):
        super().__init__()
        self.dtype = dtype
        self.base = nn.Linear(3, 3).bfloat16().requires_grad_(False)
        self.down, self.up, self.head = nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False), nn.Linear(3, 1)

    def layer(self, x):
        return self.base(x.to(self.dtype or self.base.weight.dtype)).to(x.dtype) + self.up(self.down(x))

    def forward(self, x):
        return self.head(self.layer(self.layer(x)))


def fixed():
    return Adapted(torch.bfloat16)


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def fit(model, steps, part, net, factor=1.0):
    optimizer = torch.optim.SGD(trained(model), lr=0.1, momentum=0.9)
    for batch in DATA[:steps].to(model.head.weight.dtype):
        optimizer.zero_grad()
        x = batch[part]
        (factor * (net(x[:, :3]) - x[:, 3:]).square().mean()).backward()
        optimizer.step()


def own():
    return slice(dist.get_rank(), None, dist.get_world_size())


def ours(model, steps):
    fit(model, steps, own(), DistributedDataParallel(model))


def doubled(model, steps):
    fit(model, steps, own(), DistributedDataParallel(model), factor=2.0)


def plainly(model, steps):
    fit(model, steps, slice(None), model)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(Adapted, torch.float64), (Adapted, torch.float32), (Adapted, torch.bfloat16), (fixed, torch.bfloat16)],
)
def test_same_trajectory(world, make, dtype):
    check_same_trajectory(ours, plainly, make, world, dtype=dtype)
    with pytest.raises(AssertionError, match=r"likely cause +.*2"):
        check_same_trajectory(doubled, plainly, make, world, dtype=dtype)


def test_the_dtype_to_pass_is_told(world):
    with pytest.raises(RuntimeError) as raised:
        check_same_trajectory(ours, plainly, fixed, world)
    told = "or pass dtype=torch.float32; for layers in bfloat16, dtype=torch.bfloat16"
    assert any(told in note for note in raised.value.__notes__)


def test_replicas_in_sync(world):
    def start(wraps=DistributedDataParallel):
        model = fixed()
        net, optimizer = wraps(model), torch.optim.SGD(trained(model), lr=0.1)

        def step(i):
            optimizer.zero_grad()
            net(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()

        return model, step

    check_replicas_in_sync(start, world)
    with pytest.raises(AssertionError, match="initial weights were not broadcast"):
        check_replicas_in_sync(lambda: start(lambda model: model), world)


@pytest.mark.parametrize("saves", [True, False])
def test_resume(world, saves):
    def start():
        torch.manual_seed(0)
        model = fixed()
        optimizer = torch.optim.SGD(trained(model), lr=0.1, momentum=0.9)

        def step(i):
            optimizer.zero_grad()
            model(torch.full((4, 3), i + 1.0)).square().mean().backward()
            optimizer.step()

        def save(path):
            adapters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
            torch.save((adapters, optimizer.state_dict()), f"{path}-{dist.get_rank()}")

        def load(path):
            adapters, state = torch.load(f"{path}-{dist.get_rank()}", weights_only=True)
            model.load_state_dict(adapters, strict=False)
            if saves:
                optimizer.load_state_dict(state)

        return model, step, save, load

    if saves:
        check_resume(start, world)
        return
    with pytest.raises(AssertionError, match="lost: optimizer; put back from the run without a stop"):
        check_resume(start, world)
