"""``check_sharded_layer`` on layers of all samples: causes that need further runs, with other samples or strides."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_sharded_layer
from pdlcheck.errors import CheckFailed
from pdlcheck.worlds import get_world

from ..layers_by_hand import X, part, with_a_way_back


def samples(count, *shape):
    return torch.randn(count, *(shape or (3,)), generator=torch.Generator().manual_seed(3))


class Standard(nn.Module):
    """A layer that shifts and scales samples to mean 0 and variance 1; ``moments`` computes the mean of each power."""

    def __init__(self, moments=lambda x: (x.mean(0), (x**2).mean(0)), change=lambda y: y):
        super().__init__()
        self.moments, self.change = moments, change

    def forward(self, x):
        mean, square = self.moments(x)
        return self.change((x - mean) * (square - mean**2 + 1e-5).rsqrt())


def sums(x, add=with_a_way_back):
    return add(torch.cat([x.new_tensor([len(x)]), x.sum(0), (x**2).sum(0)]))


def of_all(x, add=with_a_way_back):
    total = sums(x, add)
    return (total[1:] / total[0]).chunk(2)


def mean_of_means(x):
    return (with_a_way_back(torch.cat([x.mean(0), (x**2).mean(0)])) / dist.get_world_size()).chunk(2)


def own_means(x):
    return x.mean(0), (x**2).mean(0)


def means_times_numbers(x):
    """Return what is right, but NaN on all ranks if one of them has no samples."""
    total = with_a_way_back(torch.cat([x.new_tensor([len(x)]), x.mean(0) * len(x), (x**2).mean(0) * len(x)]))
    return (total[1:] / total[0]).chunk(2)


class AddUnevenly(torch.autograd.Function):
    """A sum over ranks whose backward pass divides by the rank's own number of samples."""

    @staticmethod
    def forward(ctx, x, count):
        ctx.count, x = count, x.clone()
        dist.all_reduce(x)
        ctx.total = float(x[0])
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad * ctx.total / (ctx.count * dist.get_world_size()), None


def unevenly_backwards(x):
    return of_all(x, lambda total: AddUnevenly.apply(total, len(x)))


def check(world, sizes, moments=of_all, change=lambda y: y, pick=None):
    def own(x):
        return x.split(sizes)[dist.get_rank()]

    def shard(whole):
        return Standard(moments, change)

    pick = pick or own
    batches = [samples(sum(sizes))]
    check_sharded_layer(shard, Standard, batches, world, world_size=len(sizes), inputs_of=pick, output_of=pick)


def cause_of(world, *args, **options):
    with pytest.raises(CheckFailed) as caught:
        check(world, *args, **options)
    return caught.value.cause or ""


@pytest.mark.parametrize("sizes", [[5, 3], [2, 3, 2], [4, 4], [4, 0]], ids=str)
def test_accepts_statistics_of_all_samples(world, sizes):
    check(world, sizes)


class AddOwnGradients(torch.autograd.Function):
    """A sum over ranks whose backward pass takes the rank's own gradient for that of each rank."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * dist.get_world_size()


class AddTopGradients(AddOwnGradients):
    """A sum over ranks whose backward pass leaves small gradients out."""

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad * (grad.abs() > grad.abs().median())


@pytest.mark.parametrize(("add", "said"), [(AddOwnGradients, True), (AddTopGradients, False)])
def test_a_backward_pass_that_takes_values_of_a_wrong_rank_is_told(world, add, said):
    cause = cause_of(world, [4, 4], lambda x: of_all(x, add.apply))
    assert cause.startswith("with the same samples on every rank it is right: a rank uses its own values") == said
    assert cause.endswith("; outputs are right, so look at the backward pass") == said


class LogOfSums(nn.Module):
    """The logarithm of a sum of exponentials over all features."""

    def __init__(self, join=lambda x: x, shift=0.0):
        super().__init__()
        self.join, self.shift = join, shift

    def forward(self, x):
        return self.join(x.exp().sum(-1)).log() + self.shift


@pytest.mark.parametrize(("shift", "said"), [(0.0, True), (0.1, False)])
def test_a_sum_of_exponentials_that_counts_each_on_all_ranks_is_told(world, shift, said):
    with pytest.raises(CheckFailed) as caught:
        check_sharded_layer(
            lambda whole: LogOfSums(with_a_way_back, shift), LogOfSums, [samples(4)], world, world_size=2
        )
    assert (
        "log(2) = 0.693147 too large: a sum of exponentials over ranks counts each" in str(caught.value.cause)
    ) == said


UNEVEN = "unlike numbers of samples are not taken into account"


@pytest.mark.parametrize(("sizes", "each"), [([5, 3], 4), ([2, 3, 2], 3)], ids=str)
def test_a_mean_of_means_of_uneven_shares_is_told(world, sizes, each):
    cause = cause_of(world, sizes, mean_of_means)
    assert re.match(rf"ranks hold [\d, and]+ samples: with {each} on every rank it is right; {UNEVEN}", cause)
    assert "backward" not in cause
    check(world, [4, 4], mean_of_means)


def test_a_division_by_the_own_number_is_told_in_the_backward_pass(world):
    cause = cause_of(world, [5, 3], unevenly_backwards)
    assert cause.startswith(f"ranks hold 5 and 3 samples: with 4 on every rank it is right; {UNEVEN}")
    assert cause.endswith("outputs are right, so look at the backward pass")


def every_second(x):
    return x[dist.get_rank() :: 2]


def test_rows_of_ranks_need_not_follow_each_other(world):
    assert UNEVEN in cause_of(world, [4, 3], mean_of_means, pick=every_second)


OWN = "each rank uses a mean or variance of its own samples"


def own_variance(x):
    mean, _ = of_all(x)
    return mean, ((x - mean) ** 2).mean(0) + mean**2


@pytest.mark.parametrize("moments", [own_means, own_variance])
@pytest.mark.parametrize("sizes", [[5, 3], [4, 4], [3, 3, 2]], ids=str)
def test_statistics_of_the_own_samples_are_told(world, moments, sizes):
    assert cause_of(world, sizes, moments).startswith(OWN)


def quadratic_mean(x):
    """Combine the variances of all ranks wrongly, but on every rank alike."""
    squares = with_a_way_back((x**2).mean(0) ** 2) / dist.get_world_size()
    return of_all(x)[0], squares.sqrt()


def test_statistics_that_are_combined_wrongly_are_not_called_the_own_ones(world):
    assert cause_of(world, [4, 4], quadratic_mean) == ""


class Below(nn.Module):
    """A layer that subtracts the largest sample."""

    def forward(self, x):
        return x - x.amax(0)


def test_a_maximum_of_the_own_samples_is_not_called_a_mean(world):
    half = partial(part, dim=0)
    with pytest.raises(CheckFailed, match=r"rank \d returns") as caught:
        check_sharded_layer(
            lambda whole: whole, Below, [samples(8)], world, world_size=2, inputs_of=half, output_of=half
        )
    assert caught.value.cause is None


def of_the_first_four(y):
    return torch.cat([y[:4], 0 * y[4:]])


def shifted_on_rank_1(y):
    return y + dist.get_rank()


def doubled_where_positive(y):
    return y * (1 + (y > 0))


@pytest.mark.parametrize("change", [of_the_first_four, shifted_on_rank_1, doubled_where_positive])
@pytest.mark.parametrize("sizes", [[5, 3], [6, 2]], ids=str)
def test_another_fault_is_no_matter_of_uneven_shares(world, change, sizes):
    cause = cause_of(world, sizes, change=change)
    assert UNEVEN not in cause
    assert OWN not in cause


def swapped(x):
    """Return the samples of another rank, in a layer that does not mix samples."""
    others = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(others, x.detach())
    return x * 0 + others[1 - dist.get_rank()]


def test_samples_of_another_rank_are_no_statistics(world):
    half = partial(part, dim=0)
    with pytest.raises(CheckFailed) as caught:
        check_sharded_layer(
            lambda whole: Changed(swapped), Changed, [samples(8)], world, world_size=2, inputs_of=half, output_of=half
        )
    assert OWN not in str(caught.value.cause)


class Changed(nn.Module):
    def __init__(self, change=lambda x: x):
        super().__init__()
        self.change = change

    def forward(self, x):
        return self.change(x) * 2


def test_nan_names_the_rank_without_samples(world):
    cause = cause_of(world, [4, 0, 3], means_times_numbers)
    assert cause.startswith("rank 1 holds no samples: with a sample on every rank it is right; ")
    assert cause.endswith("; NaN is 0 / 0, as the mean of no samples or the unbiased variance of one")


def undefined(y):
    return y * float("nan")


def test_nan_with_samples_on_every_rank_names_none(world):
    for sizes in ([4, 4], [4, 3]):
        cause = cause_of(world, sizes, change=undefined)
        assert cause.startswith("it is NaN: 0 / 0")


def lost_without_samples(y):
    count = torch.tensor([float(len(y))])
    dist.all_reduce(count, op=dist.ReduceOp.MIN)
    return y + (count == 0).to(y.dtype) * y.detach() ** 2


def test_a_rank_without_samples_is_named_without_nan(world):
    cause = cause_of(world, [4, 0], change=lost_without_samples)
    assert cause.startswith("rank 1 holds no samples: with a sample on every rank it is right; ")
    assert "NaN" not in cause


class OfSeven(Standard):
    """A layer that takes no other number of samples."""

    def forward(self, x):
        if not dist.is_initialized():
            x.view(7, 3)
        return super().forward(x)


def test_a_whole_layer_of_a_fixed_number_of_samples_still_fails_as_a_check(world):
    def own(x):
        return x.split([4, 3])[dist.get_rank()]

    def shard(whole):
        return OfSeven(mean_of_means)

    with pytest.raises(CheckFailed, match="batch 0: rank 0 returns") as caught:
        check_sharded_layer(shard, OfSeven, [samples(7)], world, world_size=2, inputs_of=own, output_of=own)
    assert caught.value.cause is None


RUNS = []


def wrong_at_first(y):
    RUNS.append(len(y))
    return y + (len(RUNS) <= 2) * y**2


def right_at_last(y):
    RUNS.append(len(y))
    return y + (len(RUNS) <= 4) * y**2


@pytest.mark.parametrize("change", [wrong_at_first, right_at_last])
def test_a_fault_that_the_control_does_not_show_proves_nothing(change):
    RUNS.clear()
    assert cause_of(get_world("sim"), [5, 3], change=change) == ""
    assert len(RUNS) > 4


class ReadsMemory(torch.autograd.Function):
    """Twice the input; reads the tensor that ``where`` names as if it were contiguous."""

    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        return 2 * (as_in_memory(x) if where == "inputs" else x)

    @staticmethod
    def backward(ctx, grad):
        return 2 * (as_in_memory(grad) if ctx.where == "gradient" else grad), None


def as_in_memory(x):
    return x.as_strided(x.shape, torch.empty(x.shape).stride())


class Twice(nn.Module):
    """A layer that is given a view with dimensions 1 and 2 exchanged, and returns one."""

    def __init__(self, where=None, change=lambda x: x):
        super().__init__()
        self.where, self.change = where, change

    def forward(self, x):
        y = ReadsMemory.apply(x.transpose(1, 2), self.where).transpose(1, 2)
        return self.change(y * 2 if self.where == "inputs" else y.mul(2))


STRIDES = (
    r"it depends on the strides of {}: with dimensions 1 and 2 exchanged in memory, the same values give the right "
)


@pytest.mark.parametrize(
    ("where", "told", "end"),
    [("inputs", "its inputs", ""), ("gradient", "the gradient of its output", "; outputs are right, so look at the ")],
)
def test_memory_that_is_read_without_strides_is_told(world, where, told, end):
    def shard(whole):
        return Twice(where)

    check_sharded_layer(lambda whole: Twice(), Twice, [X], world, world_size=2)
    with pytest.raises(CheckFailed) as caught:
        check_sharded_layer(shard, Twice, [X], world, world_size=2)
    assert re.match(STRIDES.format(told), caught.value.cause or "")
    assert end in caught.value.cause


def test_elements_in_another_order_are_no_matter_of_strides(world):
    def shard(whole):
        return Twice(change=lambda y: y.flip(1))

    with pytest.raises(CheckFailed) as caught:
        check_sharded_layer(shard, Twice, [X], world, world_size=2)
    assert "strides" not in (caught.value.cause or "")
