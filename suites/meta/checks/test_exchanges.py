"""What ranks exchanged in a step shows why their gradients differ."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_replicas_in_sync, check_same_trajectory
from pdlcheck.operations.posted import record_posted

BATCHES = torch.randn(4, 8, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def loss_of(model, batch):
    return model(batch).square().mean()


def training(synchronise, wrap=lambda model: model):
    """Return a training on the ranks' shares; ``synchronise(model, step)`` is called before each optimizer step."""

    def train(model, steps):
        model = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, batch in enumerate(BATCHES[:steps]):
            optimizer.zero_grad()
            loss_of(model, batch.chunk(dist.get_world_size())[dist.get_rank()]).backward()
            synchronise(model, step)
            optimizer.step()

    return train


def plainly(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in BATCHES[:steps]:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def nothing(model, step):
    """Synchronise nothing."""


def average(model, step, group=None):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size()


def in_node(model, step):
    """Average over the two ranks of a node."""
    groups = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    average(model, step, groups[dist.get_rank() // 2])


def across_nodes(model, step):
    """Average within each node, and then over nodes."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    nodes = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
    pairs = [dist.new_group(range(first, world_size, 2)) for first in range(2)]
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=nodes[rank // 2])
        dist.all_reduce(parameter.grad, group=pairs[rank % 2])
        parameter.grad /= world_size


def in_own_group(model, step):
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    average(model, step, groups[dist.get_rank()])


def only_in_the_first(model, step):
    if step == 0:
        average(model, step)


def one_parameter(model, step):
    """Average the first parameter alone."""
    average(nn.ParameterList([next(model.parameters())]), step)


NONE = "no rank reduced or gathered values in step {}"
CAUSES = {
    "nothing": (nothing, 2, f"{NONE.format(1)}: nothing synchronises gradients"),
    "not in the second": (only_in_the_first, 2, rf"{NONE.format(2)}, and 4 elements in step 1: no_sync\(\), or"),
    "in nodes": (in_node, 4, r"in step 1 values went only within \[0, 1\] and \[2, 3\] \(2 all_reduce\)"),
    "in groups of one": (
        in_own_group,
        2,
        r"in step 1 values went only within groups of one rank each \(2 all_reduce\)",
    ),
}


@pytest.mark.parametrize(("synchronise", "world_size", "told"), CAUSES.values(), ids=CAUSES)
def test_what_was_exchanged_is_the_cause_of_a_trajectory(world, synchronise, world_size, told):
    with pytest.raises(AssertionError, match=rf"ranks went apart: .*; {told}"):
        check_same_trajectory(
            training(synchronise), plainly, partial(nn.Linear, 3, 1), world, world_size=world_size, steps=2
        )


@pytest.mark.parametrize("synchronise", [average, across_nodes])
def test_gradients_that_reach_all_ranks_pass(world, synchronise):
    check_same_trajectory(training(synchronise), plainly, partial(nn.Linear, 3, 1), world, world_size=4, steps=2)


def test_nothing_is_said_of_exchanges_that_reach_all_ranks(world):
    told = r"got different gradients of parameter 'bias', which were not synchronised"
    with pytest.raises(AssertionError, match=told):
        check_same_trajectory(training(one_parameter), plainly, partial(nn.Linear, 3, 1), world, steps=2)


def replicas(take, wrap=DistributedDataParallel, make=None):
    """Return the ``start`` of replicas with the step ``take(model, optimizer, step)``."""

    def start():
        model = wrap(make() if make else nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, partial(take, model, optimizer)

    return start


@pytest.mark.parametrize("forgets", [False, True])
def test_steps_between_two_looks_are_named(world, forgets):
    def accumulate(model, optimizer, step):
        last = step % 2 == 1
        optimizer.zero_grad() if not last else None
        with nullcontext() if last and not forgets else model.no_sync():
            loss_of(model, torch.randn(4, 3)).backward()
        if last:
            optimizer.step()

    told = pytest.raises(AssertionError, match="no rank reduced or gathered values in steps 1 to 2: nothing")
    with told if forgets else nullcontext():
        check_replicas_in_sync(replicas(accumulate), world, world_size=3, steps=4, sync_every=2)


class Parts(nn.Module):
    """A sum of layers, of which a batch may leave one out."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 64) for _ in range(3))

    def forward(self, inputs, without):
        return sum(layer(inputs) for number, layer in enumerate(self.layers) if number != without)


@pytest.mark.parametrize("finds", [True, False])
@pytest.mark.parametrize(("without", "less"), [(2, "no rank reduced .*"), (0, "the ranks reduced or gathered [^0].*")])
def test_a_parameter_without_a_gradient_keeps_a_bucket_back(world, without, less, finds):
    def wrap(model):
        return DistributedDataParallel(model, bucket_cap_mb=1e-3, find_unused_parameters=finds)

    def take(model, optimizer, step):
        optimizer.zero_grad()
        model(torch.randn(4, 3), without if step == 2 else None).square().mean().backward()
        optimizer.step()

    told = rf"{less} in step 3, and 768 elements in step 2; 'module.layers.{without}.weight' and 1 more got no gradient"
    with nullcontext() if finds else pytest.raises(AssertionError, match=told):
        check_replicas_in_sync(replicas(take, wrap, Parts), world, world_size=3)


def test_a_comm_hook_counts_as_an_exchange(world):
    def wrap(model):
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, fp16_compress_hook)
        return model

    def changed(model, optimizer, step):
        optimizer.zero_grad()
        loss_of(model, torch.randn(4, 3)).backward()
        model.module.bias.grad += dist.get_rank()
        optimizer.step()

    with pytest.raises(AssertionError, match="gradients differ: they were not synchronised on all ranks"):
        check_replicas_in_sync(replicas(changed, wrap), world, world_size=3)


def test_a_recording_inside_of_another_ends_alone(world):
    def program():
        with record_posted(dist.get_rank()) as outer:
            with record_posted(dist.get_rank()) as inner:
                dist.all_reduce(torch.ones(1))
            dist.barrier()
        return [one.op for one in outer], [one.op for one in inner]

    assert world.run(program, world_size=2) == [(["all_reduce", "barrier"], ["all_reduce"])] * 2
