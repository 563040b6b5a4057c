"""Checks explain what they accept if users pass something similar: a function's result, arrays, batches, dicts."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from pdlcheck.checks import (
    check_clip_grad_norm,
    check_comm_hook,
    check_data_parallel,
    check_epoch_loop,
    check_grad_scaler,
    check_gradients_equal_single_process,
    check_local_sgd,
    check_metric,
    check_pipeline,
    check_sampler,
    check_sharded_layer,
)

X, Y = torch.ones(2, 3), torch.ones(2, 1)


def linear():
    return nn.Linear(3, 1)


def same(module):
    return module


def gradients(world, shards, loss=nn.MSELoss()):  # noqa: B008
    check_gradients_equal_single_process(linear, loss, shards, lambda model, num_samples: None, world)


def batches_of_four(dataset, num_replicas, rank):
    return BatchSampler(DistributedSampler(dataset, num_replicas=num_replicas, rank=rank), 4, False)


def random_order(dataset, num_replicas, rank):
    return RandomSampler(dataset)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = linear()

    def forward(self, x):
        return {"logits": self.inner(x)}


CASES = {
    "a wrapped module": (
        lambda world: check_data_parallel(linear(), world),
        "check_data_parallel takes as wrap a function, which it calls, got a Linear itself",
    ),
    "a scaler": (
        lambda world: check_grad_scaler(torch.amp.GradScaler("cpu"), world, overflows=[[0], []]),
        "check_grad_scaler takes as make_scaler a function, which it calls, got a GradScaler itself",
    ),
    "a hook alone": (
        lambda world: check_comm_hook(lambda module: allreduce_hook, world, relative=1e-6),
        "make_hook must return (state, hook), it returned a function",
    ),
    "nothing that steps": (
        lambda world: check_local_sgd(lambda optimizer, model: None, world, sync_every=2),
        "wrap must return an object with step(), it returned a NoneType",
    ),
    "a stage alone": (
        lambda world: check_pipeline(same, linear, nn.MSELoss(), [(X, Y)], world, world_size=2, n_microbatches=2),
        "start must return (module, step), it returned a Linear",
    ),
    "arrays in shards": (
        lambda world: gradients(world, [(X.numpy(), Y)] * 2),
        "shards has tensors whose first dimension is samples, the inputs of rank 0 are a ndarray; give a tensor",
    ),
    "dicts in shards": (
        lambda world: gradients(world, [(X, Y), ({"x": X}, Y)]),
        "shards has tensors whose first dimension is samples, the inputs of rank 1 are a dict; give a tensor, and have "
        "make return a module that takes it",
    ),
    "shards without targets": (
        lambda world: gradients(world, [X, X]),
        "shards has (inputs, targets) of each rank, rank 0 has a Tensor",
    ),
    "a loss for each sample": (
        lambda world: gradients(world, [(X, Y)] * 2, nn.MSELoss(reduction="none")),
        "loss must return one number, a mean or a sum over samples, it returned a tensor of shape (2, 1)",
    ),
    "numbers for gradients": (
        lambda world: check_clip_grad_norm(nn.utils.clip_grad_norm_, world, gradients=[[1.0], [2.0]], max_norm=1.0),
        "takes as gradients a list of tensors for each rank, rank 0 has a float; call torch.tensor on it",
    ),
    "a tensor for batches": (
        lambda world: check_sharded_layer(same, linear, X, world, world_size=2),
        "check_sharded_layer takes as batches a list, one input of the layer each; pass [batch]",
    ),
    "a dict for a batch": (
        lambda world: check_sharded_layer(same, linear, [{"input": X}], world, world_size=2),
        "a batch must be a tensor or a tuple of tensors, got a dict; put a module around the layer that takes and",
    ),
    "a dict for an output": (
        lambda world: check_sharded_layer(same, Named, [X], world, world_size=2),
        "what the layer returns must be a tensor or a tuple of tensors, got a dict; put a module around the layer",
    ),
    "arrays for samples": (
        lambda world: check_metric(lambda x: float(np.mean(x)), [X[0].numpy()], world),
        "check_metric takes as samples a list of tensors whose first dimension is samples, got a ndarray in it; for "
        "other samples give their places, torch.arange(number), and have evaluate look them up",
    ),
    "one tensor for samples": (
        lambda world: check_metric(lambda x: x.mean(), X[0], world),
        "check_metric takes as samples a list of tensors, such as inputs and targets; pass [samples]",
    ),
    "a sampler without epochs": (
        lambda world: check_sampler(random_order, world, num_samples=40, world_size=2),
        "the sampler, a RandomSampler, has no set_epoch, by which ranks shuffle alike and each epoch anew",
    ),
    "a sampler of batches": (
        lambda world: check_sampler(batches_of_four, world, num_samples=40, world_size=2, shuffle=False),
        "check_sampler takes samplers of single samples, a BatchSampler gives batches; give what it takes them from",
    ),
    "a loop that returns nothing": (
        lambda world: check_epoch_loop(lambda dataset, epochs: None, world, num_samples=40, world_size=2),
        "visit must return what each epoch's batches held, it returned a NoneType; have it return a list with one",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_taken_is_said_where_something_else_is_given(world, name):
    call, message = CASES[name]
    with pytest.raises(TypeError, match=re.escape(message)):
        call(world)


def test_how_a_hook_is_made_is_said_where_the_hook_itself_is_given(world):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'bucket'") as error:
        check_comm_hook(allreduce_hook, world, relative=1e-6)
    assert any(note.startswith("make_hook is called as make_hook(module)") for note in error.value.__notes__)


def test_no_shards_and_no_samples_are_told_apart(world):
    with pytest.raises(ValueError, match="shards has inputs and targets of each rank, got none"):
        gradients(world, [])
    with pytest.raises(ValueError, match="first dimension is samples, the targets of rank 0 have none"):
        gradients(world, [(X, torch.tensor(1.0))] * 2)


@dataclasses.dataclass
class Report:
    mean: float
    parts: list


def test_numbers_in_a_dataclass_are_compared_as_numbers(world):
    """Numbers that differ from those of one process in the last digits only are accepted."""

    def report(x, *, averages):
        own = x[dist.get_rank() :: dist.get_world_size()]
        total = torch.stack([own.sum(), torch.tensor(float(len(own)))])
        if averages:
            total = torch.stack([own.mean(), torch.tensor(1.0)])
        dist.all_reduce(total)
        return Report(float(total[0] / total[1]), [len(x)])

    samples = [torch.linspace(0, 1, 23).square()]
    check_metric(lambda x: report(x, averages=False), samples, world)
    with pytest.raises(AssertionError, match=r"rank 0 reports \S+ at \.mean, one process .*\n.*\n.*mean of the ranks"):
        check_metric(lambda x: report(x, averages=True), samples, world)


def test_a_loop_in_the_order_of_the_data_set_is_told_from_a_forgotten_set_epoch(world):
    def visit(dataset, epochs):
        return [list(dataset)[dist.get_rank() :: dist.get_world_size()] for _ in range(epochs)]

    check_epoch_loop(visit, world, num_samples=40, world_size=2, shuffle=False)
    told = "cause  samples come in the order of the data set: nothing is shuffled, which shuffle=False accepts"
    with pytest.raises(AssertionError, match=told):
        check_epoch_loop(visit, world, num_samples=40, world_size=2)
