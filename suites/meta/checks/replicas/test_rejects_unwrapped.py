"""check_replicas_in_sync names parameters that DistributedDataParallel does not know."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_replicas_in_sync
from pdlcheck.errors import CheckFailed


def replaced(model):
    model.module[1].weight = nn.Parameter(torch.ones(1, 3))


def unfrozen(model):
    model.module[1].weight.requires_grad_()


def nothing(model):
    pass


def start(change, sync=True, frozen=False):
    layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    layers[1].weight.requires_grad_(not frozen)
    model = DistributedDataParallel(layers, find_unused_parameters=True)
    change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(i):
        optimizer.zero_grad()
        (model if sync else model.module)(torch.randn(4, 2)).square().mean().backward()
        optimizer.step()

    return model, step


def cause_of(world, *args):
    with pytest.raises(CheckFailed) as raised:
        check_replicas_in_sync(lambda: start(*args), world, world_size=2)
    return raised.value.cause


def test_a_parameter_that_took_the_place_of_a_wrapped_one_is_named(world):
    known = "which was assigned after the wrap, in place of the parameter that it knows"
    cause = f"gradients differ: DistributedDataParallel does not reduce that of parameter 'module.1.weight', {known}"
    assert cause_of(world, replaced) == cause


@pytest.mark.parametrize(
    ("change", "sync", "frozen"), [(nothing, False, False), (replaced, False, False), (unfrozen, True, True)]
)
def test_other_gradients_that_are_not_reduced_are_not_put_down_to_it(world, change, sync, frozen):
    assert "does not reduce that of" not in cause_of(world, change, sync, frozen)


def test_right_replicas_pass(world):
    check_replicas_in_sync(lambda: start(unfrozen), world, world_size=2)
