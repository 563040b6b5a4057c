"""Bugs of reductions in place: a copy is reduced and lost, or the input is needed afterwards."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_all_reduce, check_sharded_layer

from .entry import entry


def copy_to_region(x):
    """Return the sum over ranks, made of a contiguous copy of ``x``, and not the copy that holds it."""
    dist.all_reduce(x.contiguous())
    return x


def sum_in_region(x):
    x = x.contiguous()
    dist.all_reduce(x)
    return x


@entry(
    "reduce-of-a-contiguous-copy",
    "Megatron-LM mappings",
    check="check_all_reduce",
    cause=r"with the same values in contiguous memory it is right; contiguous\(\) copies a view, and the sum went into",
)
def returns_the_input_of_the_copy(broken, world):
    """Reduce x.contiguous(), which is a copy if x is a strided view, and return x."""
    reduce = copy_to_region if broken else sum_in_region
    check_all_reduce(reduce, [torch.arange(6.0).view(2, 3) + 10 * rank for rank in range(2)], world)


class AddLossOfTokens(torch.autograd.Function):
    """The probabilities as they are; their backward pass adds the gradient of a loss that is in no output."""

    @staticmethod
    def forward(ctx, probs, loss):
        return probs.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_ones(())


class Router(nn.Module):
    """A router of tokens to experts, with a loss that balances them over the whole sequence."""

    def __init__(self, broken, hidden=5, experts=4, topk=2, coefficient=0.1):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, hidden))
        self.broken, self.topk, self.coefficient = broken, topk, coefficient

    def forward(self, tokens, valid):
        scores = (tokens @ self.weight.T).softmax(-1)
        routed = torch.zeros_like(scores).scatter(1, scores.topk(self.topk).indices, 1.0) * valid
        own_counts = routed.sum(0)
        counts = own_counts if self.broken else own_counts.clone()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(counts)
        share = counts / counts.sum()
        mean_scores = (scores * valid).sum(0) / valid.sum()
        loss = self.coefficient * len(share) * (share * mean_scores).sum()
        num_tokens = own_counts.sum() / self.topk  # the trainer divides by the tokens of all ranks
        return AddLossOfTokens.apply(scores * routed, loss * num_tokens)


@entry(
    "moe-counts-reduced-in-place",
    "Megatron-LM mixture-of-experts router",
    check="check_sharded_layer",
    judged="none",
    why="the fault lies in what the program reads after the reduction; no other division of the samples makes it right",
)
def overwrites_its_own_counts(broken, world):
    """Reduce the counts of tokens in place, and take the number of the rank's own tokens from them afterwards."""
    generator = torch.Generator().manual_seed(0)
    valid = torch.tensor([1.0] * 5 + [0.0] + [1.0] * 4 + [0.0] * 2).unsqueeze(1)

    def own_tokens(*tensors):
        parts = tuple(tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in tensors)
        return parts if len(parts) > 1 else parts[0]

    def add_gradients(router):
        dist.all_reduce(router.weight.grad)

    def sequence_parallel(router):
        return router  # the same on all ranks, each of which has a part of the tokens

    check_sharded_layer(
        sequence_parallel,
        lambda: Router(broken),
        [(torch.randn(12, 5, generator=generator), valid)],
        world,
        world_size=2,
        inputs_of=own_tokens,
        output_of=own_tokens,
        sync=add_gradients,
    )
