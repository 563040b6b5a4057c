"""``check_gradients_equal_single_process`` on losses that use the outputs of all ranks, as contrastive losses do."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_gradients_equal_single_process

DRAWN = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
SHARDS = [(DRAWN[:4], torch.zeros(4)), (DRAWN[4:], torch.zeros(4))]


class Gather(torch.autograd.Function):
    """A gather of the outputs of all ranks.

    The backward pass adds the gradients that all ranks have for the outputs of this rank.
    """

    @staticmethod
    def forward(ctx, z):
        parts = [torch.empty_like(z) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, z.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]


def without_a_way_back(z):
    return Gather.apply(z.detach())


def with_its_own_way_back(z):
    parts = list(Gather.apply(z.detach()).chunk(dist.get_world_size()))
    parts[dist.get_rank()] = z
    return torch.cat(parts)


def contrastive(outputs, _, gather=Gather.apply, rows="own"):
    """Return a contrastive loss whose pairs are neighbouring samples.

    Each rank takes the rows of its own samples, or all rows.
    """
    outputs = nn.functional.normalize(outputs, dim=-1)
    everyone, first = outputs, 0
    if dist.is_initialized():
        everyone = gather(outputs)
        first = len(outputs) * dist.get_rank()
        if rows == "all":
            outputs, first = everyone, 0
    places = torch.arange(first, first + len(outputs))
    itself = nn.functional.one_hot(places, len(everyone)).bool()
    return nn.functional.cross_entropy((outputs @ everyone.T).masked_fill(itself, -1e9), places ^ 1)


def alone(outputs, targets):
    """Return a contrastive loss over the samples of this rank only."""
    outputs = nn.functional.normalize(outputs, dim=-1)
    places = torch.arange(len(outputs))
    itself = torch.eye(len(outputs), dtype=torch.bool)
    return nn.functional.cross_entropy((outputs @ outputs.T).masked_fill(itself, -1e9), places ^ 1)


def mean(model, num_samples):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def linear():
    return nn.Linear(3, 3)


@pytest.mark.parametrize("rows", ["own", "all"])
def test_accepts_a_gather_that_gradients_come_back_through(world, rows):
    check_gradients_equal_single_process(linear, partial(contrastive, rows=rows), SHARDS, mean, world)


@pytest.mark.parametrize(
    ("loss", "cause"),
    [
        (
            partial(contrastive, gather=without_a_way_back),
            "in batch norm or a contrastive loss: on ranks they must see",
        ),
        (
            partial(contrastive, gather=with_its_own_way_back, rows="all"),
            "world_size = 2 times too small: divided once too often, or a gather in the loss cuts the way back",
        ),
        (alone, "in batch norm .call .eval.. in make., or in the loss"),
    ],
    ids=["cut", "cut in all rows", "not gathered"],
)
def test_rejects_losses_that_do_not_reach_all_ranks(world, loss, cause):
    with pytest.raises(AssertionError, match=rf"^mean: rank 0 holds [\s\S]*likely cause +.*{cause}"):
        check_gradients_equal_single_process(linear, loss, SHARDS, mean, world)


def test_a_gather_that_cuts_every_way_back_is_told(world):
    """Both sides of each pair are gathered, as by ranks that compute the loss of all samples."""
    loss = partial(contrastive, gather=without_a_way_back, rows="all")
    told = (
        r"^mean: no gradient comes back from the loss of rank \d: no parameter is in it\n  likely cause  a collective "
    )
    with pytest.raises(AssertionError, match=told):
        check_gradients_equal_single_process(linear, loss, SHARDS, mean, world)
