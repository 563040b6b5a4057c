"""``CommDebugMode`` counts the same in a watched group as in torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.worlds import get_world


def layers():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def learns(model):
    model(torch.ones(2, 4)).sum().backward()


def fully_sharded(mesh):
    model = layers()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return lambda: learns(fully_shard(model, mesh=mesh))


def tensor_parallel(mesh):
    model = parallelize_module(layers(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return lambda: learns(model)


def data_parallel(mesh):
    model = DistributedDataParallel(layers())
    return lambda: learns(model)


def spread(mesh):
    return lambda: distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).full_tensor()


def functional(mesh):
    return lambda: funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD) + 1


def plain(mesh):
    def calls():
        one, two, pair = torch.ones(1), torch.ones(2), [torch.zeros(1), torch.zeros(1)]
        first = dist.get_rank() == 0
        dist.all_reduce(one)
        dist.broadcast(one, 0)
        dist.reduce(one, 0)
        dist.all_gather(pair, one)
        dist.all_gather_into_tensor(torch.zeros(2), one)
        dist.reduce_scatter(one, [torch.ones(1)] * 2)
        dist.reduce_scatter_tensor(one, two)
        if torch.__version__ >= (2, 13):  # gloo had no such operation
            dist.all_to_all(pair, [torch.ones(1)] * 2)
        dist.all_to_all_single(torch.zeros(2), two)
        dist.gather(one, pair if first else None, 0)
        dist.scatter(one, [torch.ones(1)] * 2 if first else None, 0)
        with dist._coalescing_manager():
            for tensor in pair:
                dist.all_reduce(tensor)
        dist.barrier()
        if first:
            dist.send(two, 1)
        else:
            dist.recv(two, 0)

    return calls


def counted(make):
    step = make(init_device_mesh("cpu", (2,)))
    with CommDebugMode() as mode:
        step()
    return {str(op): number for op, number in mode.get_comm_counts().items()}


@pytest.fixture(scope="module")
def unwatched():
    world = get_world("gloo", watch=False)
    yield world
    world.close()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # about names, and about the mode's hooks
@pytest.mark.parametrize("make", [fully_sharded, tensor_parallel, data_parallel, spread, functional, plain])
def test_the_counts_are_those_of_torchs_own_groups(world, unwatched, make):
    watched, real = (one.run(counted, make, world_size=2) for one in (world, unwatched))
    assert watched == real
    assert sum(watched[0].values()) >= (10 if make is plain else 1)
