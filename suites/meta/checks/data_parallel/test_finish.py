"""Wrappers that reduce gradients when the training asks, from a buffer of their own, as Megatron's wrapper does."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_data_parallel


class Deferred(nn.Module):
    """The correct twin: a buffer for every parameter adds up gradients, and `finish_grad_sync` reduces all of them."""

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


class InFloat32(Deferred):
    """A wrapper that adds up and reduces gradients in float32, as in the training of large models."""

    def __init__(self, module):
        super().__init__(module)
        self.main_grads = {parameter: grad.float() for parameter, grad in self.main_grads.items()}

    def finish_grad_sync(self):
        for parameter, grad in self.main_grads.items():
            self.reduce(grad)
            parameter.grad = grad.to(parameter.dtype, copy=True)


class Raises(Deferred):
    def forward(self, *inputs):
        if not all(parameter.requires_grad for parameter in self.module.parameters()):
            raise NotImplementedError("frozen parameters")
        return super().forward(*inputs)


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
    check_data_parallel(Deferred, world, world_size=world_size, finish=finish)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            NeverZeroes,
            r"NeverZeroes, layers, after 3 passes or more: .*\n(.*\n)*.* 3 times the gradient of one process",
        ),
        (Sums, r"Sums, layers: .*\n(.*\n)*.*2 times too large: summed, not averaged"),
        (LeavesTheLastOut, r"LeavesTheLastOut, layers: .* of the gradient of '4.bias'"),
    ],
)
def test_check_data_parallel_rejects_one_that_does_so_wrongly(world, broken, message):
    with pytest.raises(AssertionError, match=message):
        check_data_parallel(broken, world, finish=finish)


def test_check_data_parallel_rejects_one_that_is_not_told(world):
    with pytest.raises(AssertionError, match=r"Deferred, layers: .*holds None at .* of the gradient of '0.weight'"):
        check_data_parallel(Deferred, world, no_sync=False)


def test_gradients_that_are_reduced_in_float32_are_compared_in_it(world):
    check_data_parallel(InFloat32, world, finish=finish, dtype=torch.float32)
    with pytest.raises(
        AssertionError, match=r"InFloat32, layers: .*\n(.*\n)*.*no more than float32 rounds: .*pass dtype"
    ):
        check_data_parallel(InFloat32, world, finish=finish)
    with pytest.raises(ValueError, match=r"in torch.float64 or torch.float32, got dtype=torch.float16"):
        check_data_parallel(InFloat32, world, finish=finish, dtype=torch.float16)


def test_an_error_of_the_wrapper_says_what_was_tried(world):
    with pytest.raises(NotImplementedError, match="frozen parameters") as told:
        check_data_parallel(Raises, world, finish=finish)
    assert "while check_data_parallel tried Raises, a frozen layer" in told.value.__notes__
