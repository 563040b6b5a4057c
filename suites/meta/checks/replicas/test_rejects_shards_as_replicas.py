"""Shards are not replicas: the checks report the flat tensors of FSDP1, and explain how to compare whole parameters."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from pdlcheck.checks import check_replicas_in_sync, check_same_start, check_same_trajectory

CPU = torch.device("cpu")


def net():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def fsdp1(model, **options):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch prefers fully_shard
        return FullyShardedDataParallel(model, device_id=CPU, **options)


def started(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(i):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()

    return model, step


def filled(whole, sharded):
    with FullyShardedDataParallel.summon_full_params(sharded, writeback=False), torch.no_grad():
        for own, parameter in zip(whole.parameters(), sharded.parameters(), strict=True):
            own.copy_(parameter)


def with_a_whole_copy():
    """Return the cure: a whole copy of the model, which each step fills."""
    model, step = started(fsdp1(net(), use_orig_params=True))
    whole = net()
    filled(whole, model)

    def step_and_fill(i):
        step(i)
        filled(whole, model)

    return whole, step_and_fill


def of_dtensors():
    model = net()
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    return started(model)


def test_what_each_rank_holds_whole_is_compared(world):
    check_replicas_in_sync(with_a_whole_copy, world, world_size=2)
    check_replicas_in_sync(of_dtensors, world, world_size=2)


FLAT = r"these are shards, not replicas: each rank holds a part of a flat tensor, as under FSDP1; .* summon_full_params"
SHAPES = "shapes differ: ranks made other models, or these are shards, not replicas; then give as model what each rank"


@pytest.mark.parametrize(("original", "cause"), [(False, FLAT), (True, SHAPES)], ids=["flat", "original parameters"])
def test_shards_are_told_from_replicas(world, original, cause):
    def start():
        return started(fsdp1(net(), use_orig_params=original))

    with pytest.raises(AssertionError, match=rf"differ before the first step: rank 1 holds .*\n.*\n.*cause +{cause}"):
        check_replicas_in_sync(start, world, world_size=2)
    with pytest.raises(AssertionError, match=rf"\n.*cause +{cause}"):
        check_same_start(lambda: start()[0], world, world_size=2)


def trained(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), i + 1.0, dtype=torch.float64)).square().mean().backward()
        optimizer.step()


def wraps_a_copy(model, steps):
    sharded = fsdp1(copy.deepcopy(model), use_orig_params=True)
    trained(sharded, steps)
    filled(model, sharded)


def test_training_with_fsdp1_is_compared_in_a_copy(world):
    check_same_trajectory(wraps_a_copy, trained, net, world)
    with pytest.raises(
        AssertionError, match=r"as FSDP1 does: have train wrap a copy, and load what summon_full_params"
    ):
        check_same_trajectory(lambda model, steps: trained(fsdp1(model), steps), trained, net, world)
