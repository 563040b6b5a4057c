"""Ranks that enter one collective with different arguments."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.errors import CollectiveMismatch

from .entry import fault


@fault(CollectiveMismatch, fields={"what": "the shape"}, source="NCCL #1417; DeepSpeed PR #291")
def last_batch_is_smaller(right):
    """Outputs of the last batch are gathered, and one rank has fewer of them."""
    mine = torch.full((3 if right else 3 - dist.get_rank(),), float(dist.get_rank()))
    out = [torch.zeros_like(mine) for _ in range(2)]
    dist.all_gather(out, mine)  # differs
    return torch.cat(out).tolist()


@fault(CollectiveMismatch, fields={"what": "the shape"}, source="NCCL #1417")
def flat_gradients_of_unequal_length(right):
    """A rank flattens one parameter less."""
    grads = [torch.ones(3), torch.ones(2)]
    flat = torch.cat(grads if right or dist.get_rank() == 0 else grads[:1])
    dist.all_reduce(flat)  # differs
    return flat.tolist()


@fault(CollectiveMismatch, fields={"what": "the shape"}, source="pytorch #74157; DeepSpeed PR #291")
def skips_parameters_without_gradient(right):
    """Gradients are reduced one by one; a parameter that this rank did not use has none."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 3, bias=False)})
    nn.init.ones_(model["a"].weight)
    nn.init.ones_(model["b"].weight)
    x = torch.ones(1, 2)
    (model["b"](x) if dist.get_rank() == 1 else model["b"](model["a"](x))).sum().backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            if not right:
                continue
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)  # differs
    return model["b"].weight.grad.tolist()


@fault(CollectiveMismatch, fields={"what": "the dtype"}, source="pytorch #150433")
def metric_of_another_dtype(right):
    """A rank without batches leaves its sum the integer 0."""
    metric = torch.tensor(0.0 if right or dist.get_rank() == 0 else 0)
    if dist.get_rank() == 0:
        metric += 1.5
    dist.all_reduce(metric)  # differs
    return metric.item()


@fault(CollectiveMismatch, fields={"what": "the dtype"}, source="pytorch #150433")
def one_rank_in_double_precision(right):
    """float64 came in with the data of one rank."""
    x = torch.ones(4, dtype=torch.float64 if dist.get_rank() and not right else torch.float32)
    dist.broadcast(x, 0)  # differs
    return x.tolist()


@fault(CollectiveMismatch, fields={"what": "the order of elements in memory"})
def channels_last_on_one_rank(right):
    """A rank has its model in channels_last: gradients are added as they lie in memory."""
    gradient = torch.arange(24.0).reshape(2, 3, 2, 2)
    if dist.get_rank() == 0 or right:
        gradient = gradient.contiguous(memory_format=torch.channels_last)
    dist.all_reduce(gradient)  # differs
    return gradient.flatten().tolist()


@fault(CollectiveMismatch, fields={"what": "the reduce-op"})
def maximum_on_one_rank(right):
    """The op is chosen by a setting that differs from rank to rank."""
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x, op=dist.ReduceOp.SUM if right or dist.get_rank() == 0 else dist.ReduceOp.MAX)  # differs
    return x.item()


@fault(CollectiveMismatch, fields={"what": "the root"})
def each_rank_its_own_root(right):
    """`src` is the rank itself."""
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.broadcast(x, src=0 if right else dist.get_rank())  # differs
    return x.item()


@fault(CollectiveMismatch, fields={"what": "the root"}, world_size=3)
def reduced_to_two_places(right):
    """The destination comes from a setting that one rank has not got."""
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.reduce(x, dst=1 if right or dist.get_rank() != 2 else 0)  # differs
    return x.item() if dist.get_rank() == 1 else None


@fault(CollectiveMismatch, fields={"what": "the operation"})
def reduce_meets_all_reduce(right):
    """The rank that needs the sum reduces to itself, the others to all."""
    x = torch.ones(2)
    if dist.get_rank() == 0 or right:
        dist.reduce(x, dst=0)  # differs
    else:
        dist.all_reduce(x)  # differs
    return x.tolist() if dist.get_rank() == 0 else None


@fault(CollectiveMismatch, fields={"what": "the operation"})
def broadcast_and_sum_in_another_order(right):
    """Two different collectives, called in the order of a set."""
    x = torch.ones(2)
    if right or dist.get_rank() == 0:
        dist.broadcast(x, 0)  # differs
        dist.all_reduce(x)
    else:
        dist.all_reduce(x)  # differs
        dist.broadcast(x, 0)
    return x.tolist()


@fault(CollectiveMismatch, fields={"what": "the split"})
def tokens_sent_and_expected(right):
    """Expert parallel: the ranks exchange tokens without having exchanged their counts."""
    counts = [[1, 3], [2, 2]][dist.get_rank()]  # number of tokens for each rank
    expected = [[1, 2], [3, 2]][dist.get_rank()] if right else [2, 2]
    out = torch.zeros(sum(expected))
    dist.all_to_all_single(out, torch.arange(4.0), expected, counts)  # differs
    return out.tolist()


@fault(CollectiveMismatch, fields={"what": "the split"})
def tokens_in_lists(right):
    """The same with lists of tensors."""
    rank = dist.get_rank()
    sent = [torch.full((rank + 1,), float(rank)), torch.full((2,), float(rank))]
    sizes = [(1, 2), (2, 2)][rank] if right else (1, 1)
    out = [torch.zeros(n) for n in sizes]
    dist.all_to_all(out, sent)  # differs
    return [x.tolist() for x in out]


@fault(CollectiveMismatch, fields={"what": "the shape"})
def shards_of_an_uneven_tensor(right):
    """Each rank pads its gradient to a multiple of its own idea of the world size."""
    rank = dist.get_rank()
    x = torch.ones(4 if right or rank == 0 else 6)
    out = torch.zeros(x.numel() // 2)
    dist.reduce_scatter_tensor(out, x)  # differs
    return out.tolist()


@fault(CollectiveMismatch, fields={"what": "the shape"})
def object_list_shorter_on_one_rank(right):
    """`broadcast_object_list` into a list of another length."""
    objects = ["a", "b"] if dist.get_rank() == 0 else [None] * (2 if right else 1)
    dist.broadcast_object_list(objects, src=0)  # differs
    return objects


@fault(CollectiveMismatch, fields={"what": "the number of tensors"})
def coalesced_calls_of_unequal_number(right):
    """One rank coalesces a tensor less."""
    tensors = [torch.ones(2), torch.ones(3), torch.ones(1)]
    with dist._coalescing_manager():  # differs
        for x in tensors if right or dist.get_rank() == 0 else tensors[:2]:
            dist.all_reduce(x)
    return [x.tolist() for x in tensors]


@fault(RuntimeError, says="appears not to match sizes of the same param in process 0")
def vocabulary_of_another_size(right):
    """The model is built from local data, so an embedding has another size on one rank."""
    torch.manual_seed(0)
    words = 4 if right or dist.get_rank() == 0 else 5
    model = DistributedDataParallel(nn.Embedding(words, 2))  # raises
    return model.module.weight.tolist()
