"""Wrappers that reduce gradients when the training says so, from a buffer of their own, as Megatron's does."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_data_parallel


class Deferred(nn.Module):
    """The correct twin: a buffer behind every parameter adds gradients up, `finish_grad_sync` reduces all of them."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), 0)
        self.main_grads = {p: torch.zeros_like(p) for p in module.parameters() if p.requires_grad}
        for parameter in self.main_grads:
            parameter.register_post_accumulate_grad_hook(self.take)

    def take(self, parameter):
        self.main_grads[parameter] += parameter.grad
        parameter.grad = None

    def forward(self, *inputs):
        for buffer in self.module.buffers():
            dist.broadcast(buffer.detach(), 0)
        return self.module(*inputs)

    @contextmanager
    def no_sync(self):
        yield

    def finish_grad_sync(self):
        for parameter, grad in self.main_grads.items():
            self.reduce(grad)
            parameter.grad = grad.clone()

    def reduce(self, grad):
        dist.all_reduce(grad)
        grad /= dist.get_world_size()

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for grad in self.main_grads.values():
            grad.zero_()


class NeverZeroes(Deferred):
    def zero_grad(self, set_to_none=True):
        nn.Module.zero_grad(self, set_to_none)


class Sums(Deferred):
    def reduce(self, grad):
        dist.all_reduce(grad)


class LeavesTheLastOut(Deferred):
    def finish_grad_sync(self):
        super().finish_grad_sync()
        *_, last = self.main_grads
        last.grad = None


def finish(wrapped):
    wrapped.finish_grad_sync()


@pytest.mark.parametrize("world_size", [2, 3])
def test_check_data_parallel_accepts_a_wrapper_that_is_told_when_to_reduce(world, world_size):
    check_data_parallel(Deferred, world, world_size=world_size, finish=finish, no_sync=False)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (NeverZeroes, r"NeverZeroes, layers: .*\n(.*\n)*.* times the gradient of one process"),
        (Sums, r"Sums, layers: .*\n(.*\n)*.*2 times too large: summed, not averaged"),
        (LeavesTheLastOut, r"LeavesTheLastOut, layers: .* of the gradient of '4.bias'"),
    ],
)
def test_check_data_parallel_rejects_one_that_does_so_wrongly(world, broken, message):
    with pytest.raises(AssertionError, match=message):
        check_data_parallel(broken, world, finish=finish, no_sync=False)


def test_check_data_parallel_rejects_one_that_is_not_told(world):
    with pytest.raises(AssertionError, match=r"Deferred, layers: .*holds None at .* of the gradient of '0.weight'"):
        check_data_parallel(Deferred, world, no_sync=False)
