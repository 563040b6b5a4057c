"""Building blocks of layers that are divided over ranks by hand: parts, and communication with its backward pass."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

X = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(1))  # samples, positions, features
TOKENS = torch.tensor([[0, 4, 2], [7, 7, 1], [3, 5, 6], [6, 0, 1]])


def part(x, dim=-1):
    return x.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def positions(x):
    return part(x, 1)


class Copy(torch.autograd.Function):
    """The entry of a parallel part: the backward pass adds gradients over ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Add(torch.autograd.Function):
    """The exit of a parallel part: the forward pass adds outputs over ranks."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Join(torch.autograd.Function):
    """A concatenation of outputs over ranks along a dimension; ``wrong`` ignores the dimension."""

    @staticmethod
    def forward(ctx, x, dim, wrong):
        ctx.dim = dim
        if wrong:  # blocks follow each other in memory, whatever the dimension is
            out = x.new_empty(*x.shape[:-1], x.shape[-1] * dist.get_world_size())
            blocks = list(out.view(dist.get_world_size(), -1).unbind())
            dist.all_gather(blocks, x.reshape(-1))
            return torch.stack(blocks).view(out.shape)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad):
        return part(grad, ctx.dim), None, None


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def parameter(tensor):
    return nn.Parameter(tensor.detach().clone())


def mlp():
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5))


class Mlp(nn.Module):
    def __init__(self, whole, into=Copy, out=Add, bias_on_each=False, other_part=False):
        super().__init__()
        first, last = whole[0], whole[2]
        self.w1, self.b1 = nn.Parameter(part(first.weight, 0)), nn.Parameter(part(first.bias))
        self.w2, self.b2 = nn.Parameter(part(last.weight)), parameter(last.bias)
        if other_part:
            chunks = first.bias.detach().chunk(dist.get_world_size())
            self.b1 = parameter(chunks[(dist.get_rank() + 1) % dist.get_world_size()])
        self.into, self.out, self.bias_on_each = into, out, bias_on_each

    def forward(self, x):
        y = torch.tanh(self.into.apply(x) @ self.w1.T + self.b1) @ self.w2.T
        return self.out.apply(y + self.b2) if self.bias_on_each else self.out.apply(y) + self.b2


class Columns(nn.Module):
    """A layer whose output features are divided over ranks, and joined if ``joins``."""

    def __init__(self, whole, joins=False, wrong=False):
        super().__init__()
        self.weight, self.bias = nn.Parameter(part(whole.weight, 0)), nn.Parameter(part(whole.bias))
        self.joins, self.wrong = joins, wrong

    def forward(self, x):
        y = Copy.apply(x) @ self.weight.T + self.bias
        return Join.apply(y, -1, self.wrong) if self.joins else y


def with_a_way_back(x):
    """Add over ranks, in the backward pass as well."""
    return Copy.apply(Add.apply(x))


def without_a_way_back(x):
    """Add over ranks in the same way, but without a backward pass."""
    x = x.detach().clone()
    dist.all_reduce(x)
    return x
