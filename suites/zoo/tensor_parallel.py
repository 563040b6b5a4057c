"""Bugs of layers that are divided over ranks: gradients that no rank adds, or that the ranks add twice."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_all_gather, check_sharded_layer

from .entry import entry

HIDDEN, HEADS = 6, 4
TEXTS = [torch.randn(4, 3, HIDDEN, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def own_part(x, dim=-1):
    return x.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def own_tokens(x):
    return own_part(x, 0)


def gather_tokens(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def summed(x):
    x = x.contiguous().clone()
    dist.all_reduce(x)
    return x


class CopyToModelParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return summed(grad)


class ReduceFromModelParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class GatherFromSequenceParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return gather_tokens(x)

    @staticmethod
    def backward(ctx, grad):
        return own_tokens(summed(grad))


class ReduceScatterToSequenceParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return own_tokens(summed(x))

    @staticmethod
    def backward(ctx, grad):
        return gather_tokens(grad)


class Block(nn.Module):
    """A norm and an MLP, as one process has them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.dense_h_to_4h = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.dense_4h_to_h = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        return x + self.dense_4h_to_h(torch.tanh(self.dense_h_to_4h(self.norm(x))))


class ParallelBlock(nn.Module):
    """The same block with a whole norm and a divided MLP; ``enter`` and ``leave`` bound the divided part."""

    def __init__(self, whole, enter, leave):
        super().__init__()
        self.norm = whole.norm
        self.columns = nn.Parameter(own_part(whole.dense_h_to_4h.weight, 0))
        self.rows = nn.Parameter(own_part(whole.dense_4h_to_h.weight, 1))
        self.enter, self.leave = enter, leave

    def forward(self, x):
        return x + self.leave(torch.tanh(self.enter(self.norm(x)) @ self.columns.T) @ self.rows.T)


@entry(
    "sp-layernorm-grad-not-reduced",
    "gpt-neox #1257",
    check="check_sharded_layer",
    cause="this rank's own part: 2 ranks hold the parameter, and their sum is right",
)
def keeps_the_norm_of_its_own_tokens(broken, world):
    """Each rank of a sequence-parallel block keeps the LayerNorm gradient of its own tokens."""

    def shard(whole):
        enter, leave = GatherFromSequenceParallelRegion.apply, ReduceScatterToSequenceParallelRegion.apply
        return ParallelBlock(whole, enter, leave)

    def reduce_sequence_parallel_grads(module):
        if not broken:
            for parameter in module.norm.parameters():
                dist.all_reduce(parameter.grad)

    check_sharded_layer(
        shard,
        Block,
        TEXTS,
        world,
        world_size=2,
        inputs_of=own_tokens,
        output_of=own_tokens,
        sync=reduce_sequence_parallel_grads,
    )


class GatedDeltaNet(nn.Module):
    """Heads with one norm for all of them, whole or the share of a rank."""

    def __init__(self, into=None, out=None, out_norm=None, boundaries=(None, None)):
        super().__init__()
        self.in_proj = nn.Parameter(torch.randn(HEADS * 3, HIDDEN) if into is None else into)
        self.out_norm = out_norm or nn.RMSNorm(3)
        self.out_proj = nn.Parameter(torch.randn(HIDDEN, HEADS * 3) if out is None else out)
        self.enter, self.leave = (boundary or nn.Identity() for boundary in boundaries)

    def forward(self, x):
        heads = (self.enter(x) @ self.in_proj.T).unflatten(-1, (-1, 3))
        return self.leave(self.out_norm(heads).flatten(-2) @ self.out_proj.T)


@entry(
    "tp-replicated-norm-partial",
    "Megatron-LM #7452",
    check="check_sharded_layer",
    cause="this rank's own part: 2 ranks hold the parameter, and their sum is right",
)
def marks_the_norm_only_under_sequence_parallelism(broken, world):
    """Norms of sharded heads are reduced over tensor-parallel ranks only if sequence parallelism is on."""
    sequence_parallel = False

    def shard(whole):
        boundaries = CopyToModelParallelRegion.apply, ReduceFromModelParallelRegion.apply
        parts = own_part(whole.in_proj, 0), own_part(whole.out_proj, 1)
        module = GatedDeltaNet(*parts, whole.out_norm, boundaries)
        if broken:
            module.out_norm.weight.sequence_parallel = sequence_parallel
        else:
            module.out_norm.weight.average_gradients_across_tp_domain = True
        return module

    def finalize_model_grads(module):
        for parameter in module.parameters():
            marks = ("sequence_parallel", "average_gradients_across_tp_domain")
            if any(getattr(parameter, mark, False) for mark in marks):
                dist.all_reduce(parameter.grad)

    check_sharded_layer(shard, GatedDeltaNet, TEXTS, world, world_size=2, sync=finalize_model_grads)


@entry(
    "tp-missing-backward-allreduce",
    "torchtitan #1805",
    check="check_sharded_layer",
    cause="own part, and so is the gradient of the layer's input: the backward pass .* does not add the gradient of",
)
def enters_the_parallel_region_without_a_sum(broken, world):
    """Column-parallel layers do not add the gradient of their input over ranks."""

    def shard(whole):
        enter = nn.Identity() if broken else CopyToModelParallelRegion.apply
        return ParallelBlock(whole, enter, ReduceFromModelParallelRegion.apply)

    check_sharded_layer(shard, Block, TEXTS, world, world_size=2)


@entry(
    "tp-double-allreduce",
    "AReno #496",
    check="check_sharded_layer",
    cause="2 times too large: summed once too often over its holders",
)
def adds_the_norm_in_the_optimizer_again(broken, world):
    """Optimizer hooks add the gradients of the norm, which the entry of the parallel region has already added."""

    def shard(whole):
        return ParallelBlock(whole, CopyToModelParallelRegion.apply, ReduceFromModelParallelRegion.apply)

    def allreduce_replicated_grads(module):
        if broken:
            for name, parameter in module.named_parameters():
                if "norm" in name:
                    dist.all_reduce(parameter.grad)

    check_sharded_layer(shard, Block, TEXTS, world, world_size=2, sync=allreduce_replicated_grads)


@entry(
    "gather-last-dim",
    "TransformerEngine #530",
    check="check_all_gather",
    cause="concatenated along dimension 0 and viewed in this shape",
)
def takes_blocks_for_columns(broken, world):
    """Output of all_gather_into_tensor is allocated as a concatenation along the last dimension."""

    def gather_along_last_dim(x):
        ranks = dist.get_world_size()
        if broken:
            gathered = x.new_empty(*x.shape[:-1], x.shape[-1] * ranks)
            dist.all_gather_into_tensor(gathered, x)
            return gathered
        blocks = x.new_empty(x.shape[0] * ranks, *x.shape[1:])
        dist.all_gather_into_tensor(blocks, x)
        return torch.cat(blocks.chunk(ranks), dim=-1)

    check_all_gather(gather_along_last_dim, [text[0] for text in TEXTS], world, dim=-1)
