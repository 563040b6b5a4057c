"""Equal calls in another order: every call matches a partner that fits, but the values are mixed up."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.errors import CollectiveMismatch

from .entry import fault

ORDER = {"fields": {"what": "the order"}}


@fault(CollectiveMismatch, source="speechbrain #2401; pytorch #64629; NCCL #147", **ORDER)
def losses_in_the_order_of_a_set(right):
    """Losses are reduced in the order of a set of their names, which differs from process to process."""
    losses = {"cls": torch.tensor(1.0), "box": torch.tensor(10.0)}
    names = sorted(losses)
    for name in names if right or dist.get_rank() == 0 else names[::-1]:  # the order of a set depends on PYTHONHASHSEED
        dist.all_reduce(losses[name])  # differs
    return {name: loss.item() for name, loss in losses.items()}


@fault(CollectiveMismatch, source="NCCL #147", **ORDER)
def gradients_in_the_order_of_their_hooks(right):
    """Hooks reduce gradients when they are ready, and a rank uses its layers in another order."""
    layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
    for i, layer in enumerate(layers):
        nn.init.constant_(layer.weight, i + 1.0)
    x = torch.ones(1, 2)
    (layers[0](x) * (dist.get_rank() + 1) + layers[1](x)).sum().backward()
    ready = [layer.weight for layer in layers]
    if not right and dist.get_rank():
        ready.reverse()
    for parameter in ready:
        dist.all_reduce(parameter.grad)  # differs
    return [layer.weight.grad.tolist() for layer in layers]


@fault(CollectiveMismatch, source="speechbrain #2401", **ORDER)
def two_branches_with_two_sums(right):
    """The two sums of an epoch, taken in the two orders of two branches."""
    correct, seen = torch.ones(1) * 3, torch.ones(1) * 4
    if right or dist.get_rank() == 0:
        dist.all_reduce(correct)  # differs
        dist.all_reduce(seen)  # differs
    else:
        dist.all_reduce(seen)  # differs
        dist.all_reduce(correct)  # differs
    return (correct / seen).item()


@fault(CollectiveMismatch, **ORDER)
def asynchronous_sums_in_another_order(right):
    """Works are posted in the order in which a rank's buckets fill."""
    first, second = torch.zeros(2), torch.ones(2)
    works = []
    for bucket in (first, second) if right or dist.get_rank() == 0 else (second, first):
        works.append(dist.all_reduce(bucket, async_op=True))  # differs
    for work in works:
        work.wait()
    return first.tolist(), second.tolist()


@fault(CollectiveMismatch, world_size=3, **ORDER)
def broadcasts_of_a_state_dict(right):
    """A state dict that was loaded on one rank has its keys in another order."""
    state = {"weight": torch.full((2,), 1.0 + dist.get_rank()), "bias": torch.full((2,), 5.0 + dist.get_rank())}
    if dist.get_rank() == 1 and not right:
        state = dict(sorted(state.items()))
    for name in state:
        dist.broadcast(state[name], src=0)  # differs
    return {name: tensor.tolist() for name, tensor in state.items()}
