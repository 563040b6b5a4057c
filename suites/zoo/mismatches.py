"""Bugs of collectives that ranks call with different arguments, in different orders, or not at all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_broadcast
from pdlcheck.worlds import check_same_on_worlds

from .entry import entry


@entry(
    "gloo-noncontiguous",
    "pytorch #192920, #74809",
    check="sim",
    cause="broadcast moves memory as it lies, .* other elements between its own, as a column has",
)
def broadcasts_a_column(broken, world):
    """Each rank receives a column of a table in a strided view, into which gloo copies wrongly."""

    def sync_column(table, column):
        values = table[:, column] if broken else table[:, column].contiguous()
        dist.broadcast(values, src=0)
        table[:, column] = values

    def main():
        table = torch.arange(8.0).view(4, 2) + 10 * dist.get_rank()
        sync_column(table, 0)
        assert table[:, 0].tolist() == [0.0, 2.0, 4.0, 6.0]

    world.run(main, world_size=2)


@entry("dtype-mismatch", "pytorch #150433", check="sim", cause="differ in the dtype")
def starts_a_sum_as_an_integer(broken, world):
    """Ranks without labels reduce the integer zero that their sum of losses started with."""

    def validation_loss(losses):
        total = sum(losses, start=torch.tensor(0 if broken else 0.0))
        dist.all_reduce(total)
        return total.item()

    def main():
        return validation_loss([torch.tensor(0.5)] if dist.get_rank() == 0 else [])

    world.run(main, world_size=2)


@entry("shape-mismatch", "NCCL #1417; DeepSpeed PR #291", check="sim", cause="differ in the shape")
def flattens_only_gradients_that_exist(broken, world):
    """Parameters without a gradient are left out of the flat buffer, which is shorter on a rank that skips a layer."""

    def buffered_allreduce_fallback(module):
        grads = []
        for param in module.parameters():
            if param.grad is not None:
                grads.append(param.grad.flatten())
            elif not broken:
                grads.append(torch.zeros(param.numel()))
        flat = torch.cat(grads)
        dist.all_reduce(flat)
        return flat / dist.get_world_size()

    def main():
        torch.manual_seed(0)
        experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        experts[0](torch.ones(1, 2)).sum().backward()
        if dist.get_rank() == 0:
            experts[1](torch.ones(1, 2)).sum().backward()
        return buffered_allreduce_fallback(experts).tolist()

    world.run(main, world_size=2)


@entry(
    "same-shape-order-swap",
    "speechbrain #2401; pytorch #64629; NCCL #147",
    check="sim",
    cause="differ in the order of equal calls",
)
def reduces_losses_in_the_order_of_their_batches(broken, world):
    """Losses are reduced in the order in which a rank first saw them, and two of equal shape change places."""

    def average_losses(losses):
        names = list(losses) if broken else sorted(losses)
        for name in names:
            dist.all_reduce(losses[name])
            losses[name] /= dist.get_world_size()
        return {name: loss.item() for name, loss in losses.items()}

    def main():
        losses = {}
        for task in ("ctc", "seq") if dist.get_rank() == 0 else ("seq", "ctc"):
            losses[task] = torch.tensor(1.0 if task == "ctc" else 10.0)
        return average_losses(losses)

    world.run(main, world_size=2)


@entry("early-return-before-collective", "AReaL PR #1139", check="sim", cause="fewer steps, or an early return")
def returns_without_gradients(broken, world):
    """Ranks without gradients return the norm 0 before the all_reduce of the norms."""

    def get_grad_norm(parameters):
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if broken and not grads:
            return 0.0
        total = sum((grad.square().sum() for grad in grads), start=torch.tensor(0.0))
        dist.all_reduce(total)
        return total.sqrt().item()

    def main():
        stage = nn.Linear(2, 2)
        if dist.get_rank() == 0:
            stage(torch.ones(1, 2)).sum().backward()
        return get_grad_norm(stage.parameters())

    world.run(main, world_size=2)


@entry("stop-flag-not-reduced", "sleap-nn PR #471; ppln PR #43", check="sim", cause="fewer steps, or an early return")
def stops_early_on_one_rank(broken, world):
    """Early stopping looks at the loss of each rank, and a rank that stops is missing in the next epoch."""

    def fit(val_losses, patience=1):
        model = DistributedDataParallel(nn.Linear(2, 1))
        best, bad_epochs = float("inf"), 0
        for val_loss in val_losses:
            model(torch.ones(1, 2)).sum().backward()
            bad_epochs = 0 if val_loss < best else bad_epochs + 1
            best = min(best, val_loss)
            should_stop = torch.tensor(int(bad_epochs >= patience))
            if broken:
                dist.barrier()
            else:
                dist.broadcast(should_stop, src=0)
            if should_stop:
                break

    def main():
        fit([0.9, 0.95, 0.8, 0.7] if dist.get_rank() == 0 else [0.9, 0.8, 0.7, 0.6])

    world.run(main, world_size=2)


@entry("uneven-inputs", "pytorch #33148; Lightning #20404", check="sim", cause="fewer steps, or an early return")
def trains_on_uneven_numbers_of_batches(broken, world):
    """One rank has a batch more than the others, and waits for their gradients."""

    def train_epoch(model, loader, optimizer):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()

    def main():
        loader = torch.ones(5, 2).split(1)[dist.get_rank() :: dist.get_world_size()]
        model = DistributedDataParallel(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if broken:
            train_epoch(model, loader, optimizer)
        else:
            with model.join():
                train_epoch(model, loader, optimizer)

    world.run(main, world_size=2)


@entry(
    "group-vs-global-rank",
    "sglang PR #14202; tiledarray PR #571",
    check="check_broadcast",
    cause="every rank holds the input of rank 0: .*, global rank 3: a number in the group is used as a global rank",
)
def broadcasts_from_the_rank_within_the_group(broken, world):
    """One broadcast takes the rank within the group as its source, and a member has that global rank, too."""

    def broadcast(tensor, src, group=None):
        src_in_group = dist.get_group_rank(group, src) if group is not None else src
        dist.broadcast(tensor, src=src_in_group if broken else src, group=group)

    check_broadcast(broadcast, [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])], world, src=1, ranks=[1, 3])


@entry("new-group-not-on-all", "fairseq2 PR #562", check="sim", cause="new_group is for all ranks to call")
def makes_the_group_on_its_members_only(broken, world):
    """Only the members of a group call new_group, which all ranks must call."""

    def setup_data_parallel_gang(ranks):
        if broken and dist.get_rank() not in ranks:
            return None
        group = dist.new_group(ranks)
        return group if dist.get_rank() in ranks else None

    def main():
        group = setup_data_parallel_gang([0, 2])
        x = torch.ones(1)
        if group is not None:
            dist.all_reduce(x, group=group)
        dist.barrier()

    world.run(main, world_size=3)


def reduce_in_the_order_of_a_set(broken):
    """Return the main function of a training that reduces its losses by name."""
    logged = ["ctc", "attention", "distillation", "duration", "energy", "pitch", "accuracy", "ctc", "attention"]

    def average(losses, names):
        averages = {}
        for name in names:
            value = torch.tensor(losses[name])
            dist.all_reduce(value)
            averages[name] = value.item() / dist.get_world_size()
        return averages

    def main():
        losses = {name: 10.0 * place + dist.get_rank() for place, name in enumerate(sorted(set(logged)))}
        averages = average(losses, set(logged) if broken else sorted(set(logged)))
        assert averages == {name: 10.0 * place + 0.5 for place, name in enumerate(sorted(set(logged)))}

    return main


@entry(
    "set-order-of-strings",
    "speechbrain #2401; pytorch #64629",
    check="sim",
    judged="missed",
    why="simulated ranks are threads of one process, and so have one order; a SetOrderWarning names the loop, and "
    "check_same_on_worlds finds the bug on processes",
    also=lambda broken, world: check_same_on_worlds(
        reduce_in_the_order_of_a_set(broken), world_size=2, worlds=(world, "gloo")
    ),
)
def reduces_losses_in_the_order_of_a_set(broken, world):
    """Losses are reduced in the order of a set of names, which each process orders by hashes of its own."""
    world.run(reduce_in_the_order_of_a_set(broken), world_size=2)
