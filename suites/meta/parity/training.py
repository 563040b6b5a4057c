"""Training with torch's own wrappers; each program returns its final weights."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch itself uses torch.jit
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer


class _Branches(nn.Module):
    """A model with a layer that a step may skip."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x, through_second=True):
        x = self.first(x).relu()
        return self.last(self.second(x).relu() if through_second else x)


def _model():
    torch.manual_seed(1)
    return _Branches()


def _with_buffers():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def _data_of(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 3, generator=generator)


def _data(step):
    return _data_of(dist.get_rank(), step)


def _step(model, optimizer, step, **inputs):
    optimizer.zero_grad()
    model(_data(step), **inputs).square().mean().backward()
    optimizer.step()


def _weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def _train_ddp(steps=3, hook=None, **options):
    model = _model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.00005, **options)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        _step(ddp, optimizer, step)
    return _weights(model)


def ddp():
    return _train_ddp()


def ddp_with_a_static_graph():
    return _train_ddp(static_graph=True)


def ddp_with_gradients_in_buckets():
    return _train_ddp(gradient_as_bucket_view=True)


def ddp_with_a_sparse_embedding():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Flatten(), nn.Linear(6, 1))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        ddp(torch.tensor([[dist.get_rank(), step], [8, 8]])).square().mean().backward()
        optimizer.step()
    return _weights(model)


def ddp_that_finds_unused_parameters():
    model = _model()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        _step(ddp, optimizer, step, through_second=(dist.get_rank() + step) % 2 == 0)
    return _weights(model)


def ddp_that_adds_up_gradients():
    model = _model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(2):
        with ddp.no_sync():
            ddp(_data(step)).square().mean().backward()
        ddp(_data(step + 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return _weights(model)


def ddp_with_uneven_inputs():
    model = _model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for step in range(1 + dist.get_rank()):
            _step(ddp, optimizer, step)
    return _weights(model)


def ddp_with_uneven_batches_divided_by_the_ranks_that_are_left():
    model = _model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join(divide_by_initial_world_size=False):
        for step in range(1 + dist.get_rank()):
            _step(ddp, optimizer, step)
    return _weights(model)


def ddp_with_a_hook_of_ones_own():
    def halved(state, bucket):
        work = dist.all_reduce(bucket.buffer().div_(2 * dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    return _train_ddp(hook=halved)


def ddp_with_buffers():
    torch.manual_seed(dist.get_rank())
    model = _with_buffers()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(2):
        _step(ddp, optimizer, step)
    return [*_weights(model), *(buffer.clone() for buffer in model.buffers())]


def ddp_on_two_meshes_of_two():
    mine, _ = dist.new_subgroups(2)
    return _train_ddp(process_group=mine)


def ddp_with_the_fp16_hook():
    return _train_ddp(hook=default_hooks.fp16_compress_hook)


def zero():
    model = _model()
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    for step in range(3):
        _step(ddp, optimizer, step)
    return _weights(model)


def zero_with_uneven_inputs():
    model = _model()
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    with Join([ddp, optimizer]):
        for step in range(1 + dist.get_rank()):
            _step(ddp, optimizer, step)
    return _weights(model)


def fsdp():
    model = _model()
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model.first, model.second, model.last):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        _step(model, optimizer, step)
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


def fsdp_on_two_dimensions():
    model = _model()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        _step(model, optimizer, step)
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


def post_local_sgd():
    model = _model()
    ddp = DistributedDataParallel(model)
    mine, _ = dist.new_subgroups(2)
    state = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=mine, start_localSGD_iter=2)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(ddp.parameters(), lr=0.1), PeriodicModelAverager(period=2, warmup_steps=2)
    )
    for step in range(5):
        _step(ddp, optimizer, step)
    return _weights(model)


def distributed_sampler():
    sampler = DistributedSampler(range(10), shuffle=True, seed=3)
    seen = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen += [batch.float() for batch in DataLoader(range(10), batch_size=2, sampler=sampler)]
    return seen
