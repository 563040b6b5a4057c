"""Ranks that do not enter a collective in which the others wait."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.errors import CollectiveMismatch, Deadlock

from .entry import fault

# -- a branch without the collective --------------------------------------------------------------


@fault(Deadlock, world_size=3, source="AReaL PR #1139; facebookresearch/optimizers PR #149")
def returns_early_without_gradients(right):
    """A rank that has no gradients returns before the norm is reduced."""
    grads = [torch.ones(2)] if dist.get_rank() != 1 else []
    if not grads and not right:
        return 0.0
    norm = torch.stack([g.square().sum() for g in grads]).sum() if grads else torch.zeros(())
    dist.all_reduce(norm)  # blocks
    return norm.sqrt().item()


@fault(CollectiveMismatch, world_size=3, fields={"what": "the operation"}, source="AReaL PR #1139")
def returns_early_and_meets_the_next_collective(right):
    """As before, but the rank comes to the barrier at the end of the step, which meets the others' reduction."""
    norm = torch.ones(1)
    if right or dist.get_rank() != 2:
        dist.all_reduce(norm)  # differs
    dist.barrier()  # differs
    return norm.item()


@fault(Deadlock, source="sleap-nn PR #471; ppln PR #43")
def stops_early_on_its_own_metric(right):
    """Each rank decides by its own loss when to stop."""
    for step in range(4):
        stop = torch.tensor([float(dist.get_rank() == 0 and step == 2)])
        if right:
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop.item():
            break
        dist.all_reduce(torch.ones(3))  # blocks
    return step


@fault(Deadlock, world_size=3)
def barrier_in_one_branch(right):
    """The main rank writes a file and waits for the others, who do not know."""
    if dist.get_rank() == 0:
        dist.barrier()  # blocks
    elif right:
        dist.barrier()


@fault(Deadlock, world_size=3)
def logs_a_mean_on_rank_0(right):
    """The helper that is called for the log on rank 0 contains a collective."""

    def mean(value):
        dist.all_reduce(value)  # blocks
        return value.item() / dist.get_world_size()

    loss = torch.tensor(float(dist.get_rank()))
    if right:
        loss = mean(loss)
    if dist.get_rank() == 0:
        return f"loss {loss if right else mean(loss)}"
    return None


@fault(Deadlock)
def main_rank_first_without_the_second_barrier(right):
    """Rank 0 downloads while the others wait; it forgets to let them in."""
    if dist.get_rank() != 0:
        dist.barrier()  # blocks
    data = torch.ones(2)
    if right and dist.get_rank() == 0:
        dist.barrier()
    return data.tolist()


@fault(Deadlock)
def error_is_swallowed_on_one_rank(right):
    """A batch that cannot be read is skipped on its rank alone, and with it the reduction."""
    seen = torch.zeros(1)
    for batch in range(3):
        try:
            if dist.get_rank() == 1 and batch == 1 and not right:
                raise ValueError("broken image")
            seen += 1
            dist.all_reduce(seen)  # blocks
        except ValueError:
            continue
    return seen.item()


@fault(Deadlock, world_size=3)
def broadcast_on_the_root_alone(right):
    """A broadcast taken for a one-sided send."""
    config = torch.full((2,), float(dist.get_rank() + 1))
    if dist.get_rank() == 0 or right:
        dist.broadcast(config, src=0)  # blocks
    return config.tolist()


@fault(Deadlock, world_size=3)
def gather_on_the_root_alone(right):
    """Only the rank that wants the values gathers them."""
    mine = torch.tensor([float(dist.get_rank())])
    out = [torch.zeros(1) for _ in range(3)]
    if dist.get_rank() == 0:
        dist.gather(mine, out, dst=0)  # blocks
        return [x.item() for x in out]
    return dist.gather(mine, dst=0) if right else None


@fault(Deadlock)
def reports_are_gathered_by_those_who_have_one(right):
    """An object collective that ranks without predictions leave out."""
    predictions = ["cat"] if dist.get_rank() == 0 else []
    gathered = [None, None]
    if predictions or right:
        dist.all_gather_object(gathered, predictions)  # blocks
    return gathered


@fault(Deadlock, world_size=3)
def monitored_barrier_without_a_rank(right):
    """One rank is still busy elsewhere; gloo's monitored barrier names it after its time limit."""
    if right or dist.get_rank() != 1:
        dist.monitored_barrier()  # blocks


@fault(Deadlock)
def waits_for_a_key_that_nobody_sets(right):
    """The store has the address under another name."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("address" if right else "adress", "host:1234")
        return None
    return store.get("address")  # blocks


# -- loops of unequal length ----------------------------------------------------------------------


@fault(Deadlock, source="pytorch #33148, #38174; PyMarlin #80")
def shards_of_unequal_length(right):
    """Each rank loops over its own batches and reduces in each of them."""
    samples = torch.arange(7.0)[dist.get_rank() :: 2]
    batches = samples[:3] if right else samples
    for x in batches:
        dist.all_reduce(x.clone())  # blocks
    return len(batches)


@fault(Deadlock, source="Lightning #20404; vall-e PR #93")
def ddp_over_unequal_batches(right):
    """DDP over loaders of unequal length, without its join."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1))
    batches = [torch.ones(1, 2)] * (2 + dist.get_rank())

    def train():
        for x in batches:
            model(x).sum().backward()  # blocks

    if right:
        with model.join():
            train()
    else:
        train()


@fault(Deadlock)
def accuracy_is_gathered_batch_by_batch(right):
    """Validation batches of a sampler that does not pad: the last one exists on some ranks only."""
    count = 3 - dist.get_rank()
    correct = torch.zeros(1)
    for _ in range(2 if right else count):
        out = torch.zeros(2)
        dist.all_gather_into_tensor(out, torch.ones(1))  # blocks
        correct += out.sum()
    return correct.item()


# -- frameworks -----------------------------------------------------------------------------------


@fault(Deadlock)
def validates_on_rank_0(right):
    """Rank 0 alone evaluates a model whose normalisation reduces over the ranks."""

    class SyncedNorm(nn.Module):
        def forward(self, x):
            moments = torch.stack([x.sum(), x.new_tensor(float(x.numel()))])
            dist.all_reduce(moments)  # blocks
            return x - moments[0] / moments[1]

    model = SyncedNorm()
    if dist.get_rank() == 0 or right:
        return model(torch.ones(3) + dist.get_rank()).sum().item()
    return None


@fault(Deadlock)
def ddp_step_on_one_rank(right):
    """A rank without data skips forward and backward; right: it takes part with an empty batch."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1))
    x = torch.ones(2, 2) if dist.get_rank() == 0 else torch.ones(0, 2)
    if len(x) or right:
        model(x).sum().backward()  # blocks
    return None if model.module.weight.grad is None else model.module.weight.grad.tolist()


@fault(Deadlock)
def no_sync_on_one_rank(right):
    """One rank has another batch to accumulate, so it leaves the synchronisation out."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1))
    accumulates = not right and dist.get_rank() == 1
    if accumulates:
        with model.no_sync():
            model(torch.ones(2, 2)).sum().backward()
    else:
        model(torch.ones(2, 2)).sum().backward()  # blocks


@fault(Deadlock)
def saves_shards_on_rank_0(right):
    """The full weights for the checkpoint are gathered from all ranks, but rank 0 alone asks for them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    weight = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    if right:
        return weight.full_tensor().tolist()
    if dist.get_rank() == 0:
        return weight.full_tensor().tolist()  # blocks
    return None
