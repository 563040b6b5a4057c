"""The check of gradients calls a sync function twice, and thereby finds what it keeps from the first call."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_gradients_equal_single_process

MSE = nn.MSELoss()
DRAWN = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
SHARDS = [(DRAWN[:2, :2], DRAWN[:2, 2:]), (DRAWN[2:4, :2], DRAWN[2:4, 2:]), (DRAWN[4:, :2], DRAWN[4:, 2:])]


def linear():
    return nn.Linear(2, 1)


def kept(model):
    """Return the flat buffer for all gradients, which the first call makes."""
    if not hasattr(model, "flat"):
        model.flat = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    return model.flat


def parts(model):
    start = 0
    for parameter in model.parameters():
        yield parameter, kept(model)[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()


def through_a_buffer(model, num_samples):
    kept(model).zero_()
    without_zeroing(model, num_samples)


def without_zeroing(model, num_samples):
    for parameter, part in parts(model):
        part += parameter.grad
    flat = kept(model)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for parameter, part in parts(model):
        parameter.grad = part.clone()


def filled_once(model, num_samples):
    if not hasattr(model, "flat"):
        through_a_buffer(model, num_samples)
    for parameter, part in parts(model):
        parameter.grad = part.clone()


def with_momentum(model, num_samples):
    first = not hasattr(model, "flat")
    before = kept(model).clone()
    through_a_buffer(model, num_samples)
    if not first:
        for parameter, part in parts(model):
            parameter.grad = part.clone()
        kept(model).add_(before).div_(2)
        for parameter, part in parts(model):
            parameter.grad = part.clone()


def synchronised_once(model, num_samples):
    if not hasattr(model, "flat"):
        through_a_buffer(model, num_samples)


def test_a_buffer_that_is_filled_anew_may_be_kept(world):
    check_gradients_equal_single_process(linear, MSE, SHARDS, through_a_buffer, world)


@pytest.mark.parametrize(
    ("broken", "cause"),
    [
        (without_zeroing, "what the call before gave was added: what it kept, such as a buffer, was not zeroed"),
        (filled_once, "it is what the call before gave: what it kept was not filled anew"),
        (with_momentum, "it is the mean of what this call and the one before had to give"),
        (synchronised_once, "it is the gradient of this rank's own shard: it was never synchronised"),
    ],
)
def test_what_an_earlier_call_left_is_seen(world, broken, cause):
    told = rf"^{broken.__name__}: in its second call, after 2 times the loss, rank 0 holds \S+ at \(0, 0\)"
    with pytest.raises(AssertionError, match=rf"{told}[\s\S]* 2 of 2 on every rank: [\s\S]*{cause}\n"):
        check_gradients_equal_single_process(linear, MSE, SHARDS, broken, world)


def test_a_function_that_takes_the_step_too_is_called_once(world):
    """A second call would see gradients of other weights."""
    calls = []

    def and_step(model, num_samples):
        through_a_buffer(model, num_samples)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        calls.append(dist.get_rank())

    check_gradients_equal_single_process(linear, MSE, SHARDS, and_step, world)
    assert len(calls) in (0, len(SHARDS))  # no call reaches this list from processes


def test_ranks_that_are_right_are_told(world):
    def wrong_on_rank_1(model, num_samples):
        through_a_buffer(model, num_samples)
        if dist.get_rank() == 1:
            model.bias.grad += 1

    told = r"rank 1 holds [\s\S]*wrong gradients  1 of 2 on rank 1: 'bias'; none on ranks 0, 2\n"
    with pytest.raises(AssertionError, match=told):
        check_gradients_equal_single_process(linear, MSE, SHARDS, wrong_on_rank_1, world)


class WithAuxiliaryLoss(torch.autograd.Function):
    """The identity, whose backward pass adds the gradient of an auxiliary loss that no loss scales, as Megatron's."""

    @staticmethod
    def forward(ctx, output, auxiliary):
        ctx.save_for_backward(auxiliary)
        return output

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.full_like(ctx.saved_tensors[0], 0.1)


class Router(nn.Module):
    """A layer with a penalty of large logits beside the loss."""

    def __init__(self):
        super().__init__()
        self.gate, self.head = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, x):
        logits = self.gate(x)
        return self.head(WithAuxiliaryLoss.apply(logits, logits.logsumexp(-1).square().mean()))


def test_a_part_of_the_gradient_need_not_grow_with_the_loss(world):
    check_gradients_equal_single_process(Router, MSE, SHARDS, through_a_buffer, world)
    told = r"^without_zeroing: in its second call[\s\S]*what the call before gave was added"
    with pytest.raises(AssertionError, match=told):
        check_gradients_equal_single_process(Router, MSE, SHARDS, without_zeroing, world)
