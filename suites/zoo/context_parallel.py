"""Bugs of context parallelism: the blocks of keys and values that travel around a ring."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_sharded_layer

from .entry import entry

WIDTH = 4


def gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


def own_share(*tensors):
    return tuple(x.chunk(dist.get_world_size())[dist.get_rank()] for x in tensors)


def attend(q, k, v):
    """Return the attention to one block of keys, with the logarithm of its weight."""
    scores = q @ k.T / WIDTH**0.5
    weight = scores.logsumexp(-1, keepdim=True)
    return (scores - weight).exp() @ v, weight


def merge(out, weight, more, more_weight):
    both = torch.logaddexp(weight, more_weight)
    return out * (weight - both).exp() + more * (more_weight - both).exp(), both


class RingAttention(torch.autograd.Function):
    """Attention of the rank's queries to the keys of all ranks, block by block."""

    @staticmethod
    def forward(ctx, q, k, v, broken):
        blocks = list(zip(gather(k), gather(v), strict=True))
        out, weight = attend(q, *blocks[0])
        for block in blocks[1:]:
            out, weight = merge(out, weight, *attend(q, *block))
        ctx.save_for_backward(q, k, v, out, weight)
        ctx.broken = broken
        return out

    @staticmethod
    def backward(ctx, grad):
        q, own_k, own_v, out, weight = ctx.saved_tensors
        blocks = zip(gather(own_k), gather(own_v), strict=True)
        grad_q, grads_k, grads_v = torch.zeros_like(q), [], []
        for k, v in blocks:
            if ctx.broken:
                k, v = own_k, own_v  # those that are saved
            scores = (q @ k.T / WIDTH**0.5 - weight).exp()
            of_scores = scores * (grad @ v.T - (grad * out).sum(-1, keepdim=True)) / WIDTH**0.5
            grad_q += of_scores @ k
            grads_k.append(of_scores.T @ q)
            grads_v.append(scores.T @ grad)
        of_blocks = torch.stack([torch.stack(grads_k), torch.stack(grads_v)])
        dist.all_reduce(of_blocks)
        return grad_q, *of_blocks[:, dist.get_rank()], None


class SelfAttention(nn.Module):
    """Attention over a sequence, as one process has it."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return attend(self.query(x), self.key(x), self.value(x))[0]


@entry(
    "ring-attention-stale-blocks",
    "diffusers #14265, PR #14274; Automodel PR #3157",
    check="check_sharded_layer",
    cause="with the same samples on every rank it is right: .*; outputs are right, so look at the backward pass",
)
def takes_its_own_block_in_every_backward_round(broken, world):
    """Read the saved keys and values in each round of the backward pass, not the block that has just arrived."""

    class ParallelAttention(nn.Module):
        def __init__(self, whole):
            super().__init__()
            self.query, self.key, self.value = whole.query, whole.key, whole.value

        def forward(self, x):
            return RingAttention.apply(self.query(x), self.key(x), self.value(x), broken)

    def sum_gradients(layer):
        for parameter in layer.parameters():
            dist.all_reduce(parameter.grad)

    sequences = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(3)).unbind()
    check_sharded_layer(
        ParallelAttention,
        SelfAttention,
        sequences,
        world,
        world_size=2,
        inputs_of=own_share,
        output_of=own_share,
        sync=sum_gradients,
    )
