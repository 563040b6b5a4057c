"""``check_sharded_layer`` on the buffers of a layer, and on layers without gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_sharded_layer
from pdlcheck.errors import CheckFailed, Inconclusive

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(2))


def half(x):
    """Return this rank's samples."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


class Centre(nn.Module):
    """A layer that subtracts a running mean of the batches before from each sample."""

    def __init__(self, mean=lambda x: x.mean(0)):
        super().__init__()
        self.mean = mean
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        y = x - self.centre
        self.centre.mul_(0.9).add_(0.1 * self.mean(x.detach()))
        self.batches += 1
        return y


def over_ranks(x):
    total = x.mean(0)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def undivided(x):
    return over_ranks(x) * dist.get_world_size()


def of_this_rank(x):
    return x.mean(0)


def off_on_rank_1(x):
    return over_ranks(x) * (1 + dist.get_rank())


def shard_with(mean):
    def shard(whole):
        return Centre(mean)

    return shard


def check(world, shard, batches, make=Centre, **options):
    check_sharded_layer(shard, make, batches, world, world_size=2, inputs_of=half, output_of=half, **options)


def test_accepts_buffers_that_follow_all_samples(world):
    check(world, shard_with(over_ranks), [X, X + 1, X - 2])


@pytest.mark.parametrize(
    ("mean", "told"),
    [
        (
            undivided,
            r"rank 0 holds \S+ at \(0,\) of buffer 'centre', the whole layer [^$]*it is 2 times what it should",
        ),
        (of_this_rank, r"rank 0 holds [^$]* of buffer 'centre', [^$]*own part: the mean over all ranks is right"),
        (off_on_rank_1, r"rank 1 holds \S+ at \(0,\) of buffer 'centre'"),
    ],
)
def test_rejects_buffers_of_other_samples(world, mean, told):
    """The output shows the error only with the next batch."""
    with pytest.raises(AssertionError, match=rf"batch 0: {told}") as raised:
        check(world, shard_with(mean), [X])
    assert "cure            buffers=False accepts what ranks keep in another way by intention" in str(raised.value)
    check(world, shard_with(mean), [X], buffers=False)
    with pytest.raises(AssertionError, match=r"batch 1: rank \d returns"):
        check(world, shard_with(mean), [X, X + 1], buffers=False)


def counts_twice(whole):
    made = Centre(over_ranks)
    made.register_forward_hook(lambda module, inputs, output: output * made.batches.add_(1).sign())
    return made


def test_rejects_a_count_which_is_no_proof_of_a_factor(world):
    message = r"rank 0 holds 2 at \(\) of buffer 'batches', the whole layer 1\n"
    with pytest.raises(CheckFailed, match=message) as caught:
        check(world, counts_twice, [X])
    assert caught.value.cause is None
    assert (caught.value.found, caught.value.expected) == (2.0, 1.0)


class Balance(nn.Module):
    """A layer of targets without gradients, whose rows and columns sum to one in turn, columns over all samples."""

    def __init__(self, total=lambda x: x.sum(0)):
        super().__init__()
        self.total = total

    @torch.no_grad()
    def forward(self, x):
        y = x.exp()
        for _ in range(3):
            y = y / self.total(y)
            y = y / y.sum(1, keepdim=True)
        return y


def sum_over_ranks(x):
    total = x.sum(0)
    dist.all_reduce(total)
    return total


def test_a_layer_without_gradients_is_what_it_returns(world):
    check(world, lambda whole: Balance(sum_over_ranks), [X], make=Balance)
    with pytest.raises(AssertionError, match=r"batch 0: rank 0 returns \S+ at \(0, 0\), the whole layer"):
        check(world, lambda whole: Balance(), [X], make=Balance)


class Zeros(nn.Module):
    def forward(self, x):
        return torch.zeros_like(x)


def test_zeros_without_gradients_show_nothing(world):
    with pytest.raises(Inconclusive, match="the whole layer has no gradient and returns zeros"):
        check(world, lambda whole: Zeros(), [X], make=Zeros)
