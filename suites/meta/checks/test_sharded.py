"""The checks accept models whose tensors are sharded over ranks, or whose gradients are sparse."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pdlcheck.checks import check_data_parallel, check_replicas_in_sync, check_resume, check_same_trajectory
from pdlcheck.primitives import broadcast_parameters, sync_gradients

X = torch.tensor([[1.0, 2], [3, -1], [2, 2], [-1, 1]], dtype=torch.float64)
Y = torch.tensor([[1.0], [-2], [0.5], [3]], dtype=torch.float64)


def net():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def all_ranks():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(model):
    return fully_shard(model, mesh=all_ranks())


def train(model, steps, inputs=X, targets=Y):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def fully_sharded(model, steps):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train(sharded(model), steps, X.chunk(world_size)[rank], Y.chunk(world_size)[rank])


def fully_sharded_on_the_samples_of_rank_0(model, steps):
    world_size = dist.get_world_size()
    train(sharded(model), steps, X.chunk(world_size)[0], Y.chunk(world_size)[0])


def tensor_parallel(model, steps):
    train(parallelize_module(model, all_ranks(), {"0": ColwiseParallel(), "2": RowwiseParallel()}), steps)


@pytest.mark.parametrize("parallel", [fully_sharded, tensor_parallel])
def test_check_same_trajectory_accepts_sharded_weights(world, parallel):
    check_same_trajectory(parallel, train, net, world)


def test_check_same_trajectory_rejects_sharded_weights_that_learn_from_one_rank(world):
    with pytest.raises(AssertionError, match=r"after 1 step\(s\) rank 0 holds \S+ at \(0, 0\) of parameter '0.weight'"):
        check_same_trajectory(fully_sharded_on_the_samples_of_rank_0, train, net, world)


def tensor_parallel_with_a_norm(*, reduces):
    """Return a training with a layer norm that is replicated in the tensor-parallel group."""

    def start():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, 1))
        parallelize_module(model, all_ranks(), {"0": ColwiseParallel(output_layouts=None)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(i):
            torch.manual_seed(dist.get_rank() + i)
            optimizer.zero_grad()
            model[2](model[1](torch.randn(3, 4))).square().mean().backward()
            if reduces:
                sync_gradients(model[1:])
            optimizer.step()

        return model, step

    return start


def test_check_replicas_in_sync_compares_what_is_replicated_beside_shards(world):
    check_replicas_in_sync(tensor_parallel_with_a_norm(reduces=True), world, world_size=2)
    with pytest.raises(AssertionError, match=r"after step 1: rank 1 holds \S+ at \(0,\) of parameter '1.weight'"):
        check_replicas_in_sync(tensor_parallel_with_a_norm(reduces=False), world, world_size=2)


def test_check_data_parallel_accepts_fully_sharded_replicas(world):
    check_data_parallel(sharded, world, unused=False, no_sync=False, buffers=False)


def test_check_data_parallel_rejects_a_mesh_of_one_rank_each(world):
    def alone(model):
        broadcast_parameters(model)
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("all", "one"))
        return fully_shard(model, mesh=mesh["one"])

    with pytest.raises(AssertionError, match="never synchronised"):
        check_data_parallel(alone, world, unused=False, no_sync=False, buffers=False)


def resumed(*, optimizer_too):
    def start():
        model = sharded(net().double())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def step(i):
            optimizer.zero_grad()
            model(X + i).square().mean().backward()
            optimizer.step()

        def save(path):
            path.mkdir(exist_ok=True)
            torch.save((model.state_dict(), optimizer.state_dict()), path / f"{dist.get_rank()}.pt")

        def load(path):
            weights, states = torch.load(path / f"{dist.get_rank()}.pt", weights_only=False)
            model.load_state_dict(weights)
            if optimizer_too:
                optimizer.load_state_dict(states)

        return model, step, save, load

    return start


def test_check_resume_compares_shards(world):
    check_resume(resumed(optimizer_too=True), world)
    with pytest.raises(AssertionError, match=r"lost: optimizer; put back [\s\S]*optimizer\['state'\]\[0\] is missing"):
        check_resume(resumed(optimizer_too=False), world)


def embedding(*, syncs):
    def start():
        model = nn.Embedding(5, 2, sparse=True)
        broadcast_parameters(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(i):
            optimizer.zero_grad()
            model(torch.tensor([dist.get_rank(), i])).square().mean().backward()
            if syncs:
                dense = model.weight.grad.to_dense()
                dist.all_reduce(dense)
                model.weight.grad = dense.to_sparse(1)
            optimizer.step()

        return model, step

    return start


def test_check_replicas_in_sync_compares_sparse_gradients(world):
    check_replicas_in_sync(embedding(syncs=True), world)
    with pytest.raises(AssertionError, match="gradients differ: no rank reduced or gathered values in step 1"):
        check_replicas_in_sync(embedding(syncs=False), world)
