"""Bugs of mixtures of experts: parameters that some ranks hold, among others that all ranks hold."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single

from pdlcheck.checks import check_clip_grad_norm, check_same_trajectory, check_sharded_layer

from .entry import entry

HIDDEN, N_EXPERTS = 4, 4


class Sum(torch.autograd.Function):
    """The identity, whose gradient is added over ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total


class AddedUp(torch.autograd.Function):
    """The sum over ranks, whose gradient each rank has already."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad


def mixed(tokens, weights, first, experts):
    """Return the outputs of some experts, each times the weight that the router gives it."""
    outputs = [weights[:, first + place, None] * torch.tanh(tokens @ expert) for place, expert in enumerate(experts)]
    return torch.stack(outputs).sum(0)


def top_weights(logits, k=2):
    chosen = logits.softmax(-1).topk(k)
    return torch.zeros_like(logits).scatter(-1, chosen.indices, chosen.values)


class SparseMlp(nn.Module):
    """A router and its experts, as one process has them."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, N_EXPERTS, bias=False)
        self.experts = nn.ParameterList(torch.randn(HIDDEN, HIDDEN) for _ in range(N_EXPERTS))

    def forward(self, tokens):
        return mixed(tokens, top_weights(self.gate(tokens)), 0, self.experts)


@entry(
    "ep-router-gradient-of-own-experts",
    "transformers #48687, PR #48205",
    check="check_sharded_layer",
    cause="this rank's own part: 2 ranks hold the parameter, and their sum is right",
)
def keeps_the_router_gradient_of_its_experts(broken, world):
    """Each rank keeps the gradient of the router that its own experts give, although all tokens are on all ranks."""

    class ParallelMlp(nn.Module):
        def __init__(self, whole):
            super().__init__()
            own = N_EXPERTS // dist.get_world_size()
            self.gate, self.first = whole.gate, own * dist.get_rank()
            self.experts = nn.ParameterList(whole.experts[self.first : self.first + own])

        def forward(self, tokens):
            weights = top_weights(self.gate(tokens))
            if not broken:
                weights = Sum.apply(weights)
            return AddedUp.apply(mixed(Sum.apply(tokens), weights, self.first, self.experts))

    batches = torch.randn(2, 6, HIDDEN, generator=torch.Generator().manual_seed(4)).unbind()
    check_sharded_layer(ParallelMlp, SparseMlp, batches, world, world_size=2)


@entry(
    "clip-norm-without-experts",
    "Megatron-LM PR #5916",
    check="check_clip_grad_norm",
    cause="gradient 2 of rank 1 is missing from the norm",
)
def leaves_experts_of_other_ranks_out_of_the_norm(broken, world):
    """Drop experts from the norm on all ranks except the first, by the filter for copies of tensor parallelism."""

    def is_copy(is_sharded, is_expert):
        if is_expert and not broken:
            return False  # each rank has experts of its own
        return not is_sharded and dist.get_rank() > 0

    def clip_grad_norm(parameters, max_norm):
        kinds = [(True, False), (False, False), (False, True)]  # attention, norm, expert
        counting = [p.grad for p, kind in zip(parameters, kinds, strict=True) if not is_copy(*kind)]
        total = torch.stack([grad.double().pow(2).sum() for grad in counting]).sum()
        dist.all_reduce(total)
        scale = (max_norm / (total.sqrt() + 1e-6)).clamp(max=1.0)
        for parameter in parameters:
            parameter.grad *= scale
        return total.sqrt()

    norm = torch.tensor([1.5, -0.5])
    gradients = [
        [torch.tensor([2.0, 1.0, -1.0]), norm, torch.tensor([3.0])],
        [torch.tensor([0.5, -2.0, 1.0]), norm, torch.tensor([-2.5])],
    ]
    counted = [[True, True, True], [True, False, True]]
    check_clip_grad_norm(clip_grad_norm, world, gradients=gradients, max_norm=1.0, counted=counted)


class Router(nn.Module):
    """A router to one expert for each token."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, N_EXPERTS)
        self.experts = nn.Parameter(torch.randn(N_EXPERTS, HIDDEN, HIDDEN))

    def forward(self, tokens):
        return mixed(tokens, top_weights(self.gate(tokens), 1), 0, self.experts)


TOKENS = torch.randn(4, 12, HIDDEN, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@entry(
    "expert-gradients-times-ep-size",
    "Megatron-LM #5656, PR #5956; pytorch #160285",
    check="check_same_trajectory",
    cause="not divided, as by the 2 ranks of a group; the other parameters are right, so not the whole",
)
def averages_experts_over_their_replicas_only(broken, world):
    """Divide the gradients of experts by the number of their replicas, although the tokens come from all ranks."""

    def train(model, steps, ep_size=2):
        rank, replicas = dist.get_rank(), dist.get_world_size() // ep_size
        ep_groups = [dist.new_group(list(range(start, start + ep_size))) for start in (0, ep_size)]
        edp_groups = [dist.new_group(list(range(place, ep_size * replicas, ep_size))) for place in range(ep_size)]
        ep_group, edp_group = ep_groups[rank // ep_size], edp_groups[rank % ep_size]
        own = slice(rank % ep_size * N_EXPERTS // ep_size, (rank % ep_size + 1) * N_EXPERTS // ep_size)
        experts = nn.Parameter(model.experts.detach()[own].clone())
        optimizer = torch.optim.SGD([*model.gate.parameters(), experts], lr=0.2)
        exchange = partial(exchanged, group=ep_group)
        for batch in TOKENS[:steps]:
            tokens = batch.chunk(dist.get_world_size())[rank]
            optimizer.zero_grad()
            sent = torch.cat([tokens, top_weights(model.gate(tokens), 1)], -1).repeat(ep_size, 1)
            received, weights = exchange(sent).split([HIDDEN, N_EXPERTS], -1)
            outputs = exchange(mixed(received, weights, own.start, experts)).chunk(ep_size)
            (torch.stack(outputs).sum(0) - tokens.flip(-1)).square().mean().backward()
            for parameter in model.gate.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            dist.all_reduce(experts.grad, group=edp_group)
            experts.grad /= replicas if broken else dist.get_world_size()
            optimizer.step()
        with torch.no_grad():  # as for a checkpoint of the whole model
            model.experts.zero_()[own] = experts
            dist.all_reduce(model.experts, group=ep_group)

    def plain(model, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        for tokens in TOKENS[:steps]:
            optimizer.zero_grad()
            (model(tokens) - tokens.flip(-1)).square().mean().backward()
            optimizer.step()

    check_same_trajectory(train, plain, Router, world, world_size=4)


def exchanged(x, group):
    return all_to_all_single(torch.empty_like(x), x.contiguous(), group=group)
