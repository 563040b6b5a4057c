"""Bugs of losses over a vocabulary that is divided over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from pdlcheck.checks import check_sharded_layer

from .entry import entry
from .tensor_parallel import CopyToModelParallelRegion, ReduceFromModelParallelRegion, own_part

HIDDEN, VOCABULARY = 4, 6


class GatherLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        return own_part(grad)


class Head(nn.Module):
    """The output layer and its loss, as one process has them."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, hidden, targets):
        return functional.cross_entropy(self.out(hidden), targets, reduction="none")


def cross_entropy_of_shards(logits, targets):
    """Return the loss of logits of which each rank has a part."""
    begin = logits.shape[-1] * dist.get_rank()
    is_here = (targets >= begin) & (targets < begin + logits.shape[-1])
    places = torch.where(is_here, targets - begin, 0).unsqueeze(-1)
    of_target = logits.gather(-1, places).squeeze(-1) * is_here
    total = ReduceFromModelParallelRegion.apply(logits.exp().sum(-1))
    return total.log() - ReduceFromModelParallelRegion.apply(of_target)


@entry(
    "gathered-logits-in-a-parallel-loss",
    "Megatron-LM #7452",
    check="check_sharded_layer",
    cause=r"log\(2\) = 0.693147 too large: .* as where a loss for divided logits is given gathered ones",
)
def gathers_logits_for_a_loss_of_shards(broken, world):
    """Gather the logits, and give them to the loss that takes the shard of each rank."""

    class ParallelHead(nn.Module):
        def __init__(self, whole):
            super().__init__()
            self.weight = nn.Parameter(own_part(whole.out.weight, 0))

        def forward(self, hidden, targets):
            logits = functional.linear(CopyToModelParallelRegion.apply(hidden), self.weight)
            return cross_entropy_of_shards(GatherLogits.apply(logits) if broken else logits, targets)

    generator = torch.Generator().manual_seed(2)
    batch = torch.randn(5, HIDDEN, generator=generator), torch.randint(0, VOCABULARY, (5,), generator=generator)
    check_sharded_layer(ParallelHead, Head, [batch], world, world_size=2)
