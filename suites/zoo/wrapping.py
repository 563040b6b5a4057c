"""Bugs of the start of replicas, of wraps and of what a wrap synchronises."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_replicas_in_sync, check_same_start, check_same_trajectory

from .entry import entry


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def trainer(model, loss_of):
    """Return a step of SGD with the loss ``loss_of(step)``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(i):
        optimizer.zero_grad()
        loss_of(i).backward()
        optimizer.step()

    return step


def own_batch(dtype=torch.float32):
    """Return a batch of this rank; ranks draw different numbers."""
    return torch.randn(8, 3, dtype=dtype), torch.randn(8, 1, dtype=dtype)


@entry(
    "no-init-broadcast",
    "pytorch #75870, fairscale #584",
    check="check_replicas_in_sync",
    cause=r"initial weights were not broadcast",
)
def starts_each_rank_with_weights_of_its_own(broken, world):
    """Draw initial weights on each rank, and synchronise nothing except gradients."""

    class DataParallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module
            if not broken:
                for tensor in module.state_dict().values():
                    dist.broadcast(tensor, 0)

        def forward(self, inputs):
            return self.module(inputs)

        def average_gradients(self):
            for parameter in self.module.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    def start():
        model = DataParallel(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(_):
            optimizer.zero_grad()
            inputs, targets = own_batch()
            functional.mse_loss(model(inputs), targets).backward()
            model.average_gradients()
            optimizer.step()

        return model, step

    check_replicas_in_sync(start, world)


@entry(
    "reset-after-wrap",
    "WeatherGenerator PR #2631",
    check="check_replicas_in_sync",
    cause=r"initial weights .* were changed on some rank after the broadcast",
)
def resets_the_head_after_the_wrap(broken, world):
    """Draw the weights of the head anew on each rank, after DDP has broadcast the model."""

    def start():
        model = net()
        if not broken:
            model[-1].reset_parameters()
        ddp = DistributedDataParallel(model)
        if broken:
            ddp.module[-1].reset_parameters()

        def loss_of(_):
            inputs, targets = own_batch()
            return functional.mse_loss(ddp(inputs), targets)

        return ddp, trainer(ddp, loss_of)

    check_replicas_in_sync(start, world)


@entry(
    "module-cast-after-wrap",
    "pytorch #104336",
    check="check_replicas_in_sync",
    cause=r"no rank reduced or gathered values in step 1: .* the hooks of a wrapper do not run, .* cast",
)
def casts_the_model_after_the_wrap(broken, world):
    """Cast the model to float64 after the wrap, which leaves the hooks of DDP at the old gradient accumulators."""

    def start():
        ddp = DistributedDataParallel(net() if broken else net().double())
        if broken:
            ddp = ddp.double()

        def loss_of(_):
            inputs, targets = own_batch(torch.float64)
            return functional.mse_loss(ddp(inputs), targets)

        return ddp, trainer(ddp, loss_of)

    check_replicas_in_sync(start, world)


class Branches(nn.Module):
    """A model with an auxiliary head that only some batches use."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head, self.auxiliary = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, inputs, auxiliary):
        hidden = torch.tanh(self.backbone(inputs))
        return self.head(hidden) + self.auxiliary(hidden) if auxiliary else self.head(hidden)


@entry(
    "unused-parameter-last-step",
    "pytorch #128949, #112152",
    check="check_replicas_in_sync",
    cause=r"no rank reduced .* in step 3, .*'module.auxiliary.weight' and 1 more got no gradient",
)
def leaves_a_branch_unused(broken, world):
    """Leave the auxiliary head out in the last step, so that DDP does not reduce the bucket of its parameters."""

    def start(auxiliary_steps=2):
        ddp = DistributedDataParallel(Branches(), find_unused_parameters=not broken)

        def loss_of(i):
            inputs, targets = own_batch()
            return functional.mse_loss(ddp(inputs, auxiliary=i < auxiliary_steps), targets)

        return ddp, trainer(ddp, loss_of)

    check_replicas_in_sync(start, world)


BATCHES = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def error(model, samples):
    return functional.mse_loss(model(samples[:, :3]), samples[:, 3:])


def plainly(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in BATCHES[:steps]:
        optimizer.zero_grad()
        error(model, batch).backward()
        optimizer.step()


def own_share(batch):
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


@entry(
    "no-sync-around-forward-only",
    "accelerate PR #1726",
    check="check_same_trajectory",
    cause=r"no rank reduced or gathered values in step 1: .* no_sync\(\) at the forward pass",
)
def leaves_no_sync_before_the_backward_pass(broken, world):
    """Enter no_sync() for the last forward pass, too, where DDP decides whether it reduces gradients."""

    def train(model, steps, num_micro_batches=2):
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for batch in BATCHES[:steps]:
            optimizer.zero_grad()
            for index, micro in enumerate(own_share(batch).chunk(num_micro_batches)):
                last = index == num_micro_batches - 1
                with nullcontext() if last and not broken else ddp.no_sync():
                    loss = error(ddp, micro) / num_micro_batches
                    if not last:
                        loss.backward()
                if last:
                    loss.backward()
            optimizer.step()

    check_same_trajectory(train, plainly, net, world)


@entry(
    "fsdp-size-one-no-sync",
    "verl #7493",
    check="check_same_trajectory",
    cause="values went only within groups of one rank each .* along a dimension of a mesh",
)
def shards_over_the_axis_of_size_one(broken, world):
    """Reduce gradients over the axis of size 1 of a mesh, which fsdp_size=1 makes."""

    def create_device_mesh(fsdp_size):
        world_size = dist.get_world_size()
        return init_device_mesh("cpu", (world_size // fsdp_size, fsdp_size), mesh_dim_names=("ddp", "fsdp"))

    def train(model, steps):
        device_mesh, strategy = create_device_mesh(fsdp_size=1), ShardingStrategy.HYBRID_SHARD
        if not broken:
            device_mesh, strategy = device_mesh["ddp"], ShardingStrategy.NO_SHARD
        actor = FullyShardedDataParallel(
            model,
            device_mesh=device_mesh,
            sharding_strategy=strategy,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        optimizer = torch.optim.SGD(actor.parameters(), lr=0.1, momentum=0.9)
        for batch in BATCHES[:steps]:
            optimizer.zero_grad()
            error(actor, own_share(batch)).backward()
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_same_trajectory(train, plainly, net, world)


class Rotary(nn.Module):
    """A layer with a buffer that no checkpoint has, and one that it has."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.register_buffer("inv_freq", 1e4 ** -torch.linspace(0, 1, 2), persistent=False)
        self.register_buffer("running_mean", torch.zeros(4))


@entry(
    "buffers-skip-second-broadcast",
    "pytorch PR #178569",
    check="check_same_start",
    cause=r"only buffers differ: they were not broadcast",
)
def skips_buffers_in_the_broadcast_across_nodes(broken, world):
    """Skip buffers in the broadcast across nodes, because the broadcast inside a node marks them as done."""

    def sync_module_states(module, group, synced):
        for tensor in module.parameters():
            dist.broadcast(tensor.data, group=group, group_src=0)
        for name, buffer in module.named_buffers():
            if name not in synced:
                dist.broadcast(buffer, group=group, group_src=0)
                synced.add(name)

    def hybrid_shard():
        module = Rotary()
        if dist.get_rank() != 0:  # only rank 0 has the values, the others have memory with any content
            for tensor in [*module.parameters(), *module.buffers()]:
                nn.init.normal_(tensor)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across_nodes", "in_node"))
        synced = set()
        sync_module_states(module, mesh["in_node"].get_group(), synced)
        sync_module_states(module, mesh["across_nodes"].get_group(), synced if broken else set())
        return module

    check_same_start(hybrid_shard, world, world_size=4)
