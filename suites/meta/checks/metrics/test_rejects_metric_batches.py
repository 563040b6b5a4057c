"""The check of metrics names the cause of errors with batches that are dealt to ranks, averaged, or wrongly counted."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from pdlcheck.checks import check_metric

ERRORS = [((torch.arange(21.0) * 7 + 1) % 13).square()]


def dealt(values, size=4):
    """Return the batches of this rank as accelerate deals them.

    Ranks get batches in turn; the first samples fill up the last batches.
    """
    order, world_size = torch.arange(len(values)), dist.get_world_size()
    if world_size > 1:
        order = torch.cat([order, order[: -len(order) % (size * world_size)]])
    return [values[rows] for rows in order.split(size)[dist.get_rank() :: world_size]]


def gathered(values):
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return torch.cat(parts)


def own(values):
    return values[dist.get_rank() :: dist.get_world_size()]


def summed(number):
    total = torch.as_tensor(number, dtype=torch.float64).clone()
    dist.all_reduce(total)
    return float(total)


def gathers_for_metrics(errors):
    return float(torch.cat([gathered(batch) for batch in dealt(errors)])[: len(errors)].mean())


def gathers(errors):
    return float(torch.cat([gathered(batch) for batch in dealt(errors)]).mean())


def gathers_two_numbers(errors):
    everything = torch.cat([gathered(batch) for batch in dealt(errors)])
    return {"small": float((everything < 30).double().mean()), "mean": float(everything.mean())}


def own_batches(errors):
    return float(torch.cat(dealt(errors)).mean())


def means_of_batches(errors):
    means = torch.stack([batch.mean() for batch in own(errors).split(4)])
    return summed(means.mean()) / dist.get_world_size()


def own_means_of_batches(errors):
    return float(torch.stack([batch.mean() for batch in own(errors).split(4)]).mean())


def divided_by_its_own(errors):
    return summed(own(errors).sum()) / len(own(errors))


def own_sum(errors):
    return float(own(errors).sum()) / len(errors)


def not_divided(errors):
    return summed(own(errors).sum())


def divided_twice(errors):
    return summed(own(errors).sum()) / len(errors) ** 2


def padded_sum(errors, drop_last=False):
    return summed(errors[list(DistributedSampler(errors, shuffle=False, drop_last=drop_last))].sum()) / len(errors)


def dropped_sum(errors):
    return padded_sum(errors, drop_last=True)


def own_without_the_tail(errors):
    return float(errors[list(DistributedSampler(errors, shuffle=False, drop_last=True))].mean())


def mean(errors):
    return float(errors.mean())


CURE = r"as accelerate's gather_for_metrics\(\) does"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (gathers, rf"the first 3 samples count twice, as a loader fills up the last batches: .*{CURE}\n"),
        (gathers_two_numbers, rf"the first 3 samples count twice, as a loader fills up the last batches: .*{CURE}\n"),
        (own_batches, r"the value of the samples of rank 0 alone, dealt in batches of 4: it was not reduced\n"),
        (means_of_batches, r"the mean of the values of batches of 4, each counted once: weigh them by their samples\n"),
        (own_means_of_batches, r"the mean of the values of rank 0's batches of 4 alone: it was not reduced\n"),
        (divided_by_its_own, r"a sum over all ranks, divided by the samples of rank 0 alone\n"),
        (own_sum, r"the sum of rank 0 alone, divided by the samples of all ranks\n"),
        (not_divided, r"a sum over the samples: it was not divided by their number\n"),
        (divided_twice, r"it was divided by the number of samples once too often\n"),
        (padded_sum, r"samples that a sampler repeats are in the sum, not in its number: the sum is divided by 21\n"),
        (own_without_the_tail, r"the value of the samples of rank 0 alone: it was not reduced\n"),
        (dropped_sum, r"samples that a sampler drops are in the number, not in the sum: the sum is divided by 21\n"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_cause_is_named(world, broken, message):
    with pytest.raises(
        AssertionError, match=rf"^{broken.__name__}: rank 0 reports .*\n.*\n(  one rank .*\n)?  likely cause  {message}"
    ):
        check_metric(broken, ERRORS, world, reference=None if broken is gathers_two_numbers else mean)


def test_what_fills_up_batches_may_be_left_out(world):
    check_metric(gathers_for_metrics, ERRORS, world)
    check_metric(gathers_for_metrics, ERRORS, world, reference=mean)


def test_a_cause_that_gives_all_wrong_numbers_goes_before_one_that_gives_some(world):
    """The first and the last error are both small, so that either of them might count twice."""

    def both(errors):
        rows = list(DistributedSampler(errors, shuffle=False))
        count = summed(len(rows))
        return {"small": summed((errors[rows] < 30).sum()) / count, "mean": summed(errors[rows].sum()) / count}

    with pytest.raises(AssertionError, match=r"at \['small'\].*\n.*\n.*the first sample counts twice, as [^;]*\n"):
        check_metric(both, ERRORS, world)


def rows_of(count, **more):
    return torch.tensor(list(DistributedSampler(range(count), seed=3, **more)))


def shuffled(errors, drop_last=False):
    values = errors[rows_of(len(errors), drop_last=drop_last)]
    return summed(values.sum()) / summed(len(values))


def shuffled_and_dropped(errors):
    return shuffled(errors, drop_last=True)


def sums_on_rank_0(errors):
    total = torch.tensor([float(own(errors).sum()), float(len(own(errors)))])
    dist.reduce(total, 0)
    return float(total[0] / total[1]) if dist.get_rank() == 0 else -1.0


def end_to_end(errors):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own(errors).tolist())
    return {"values": [value for part in parts for value in part], "mean": summed(own(errors).sum()) / len(errors)}


def in_turn(errors):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own(errors).tolist())
    values = [part[place] for place in range(len(parts[0])) for part in parts if place < len(part)]
    return {"values": values, "mean": summed(own(errors).sum()) / len(errors)}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (shuffled, r"one sample counts twice, as a sampler that shuffles pads to 22: .*\n"),
        (shuffled_and_dropped, r"one sample counts not at all, as a sampler that shuffles drops what does not fill 2 "),
        (
            sums_on_rank_0,
            r"no known cause fits; .*; note: ranks report unlike numbers: each has that of its own samples, or ",
        ),
        (end_to_end, r"these are the right numbers in other places: what ranks have is put end to end"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_told_of_single_samples_places_and_ranks_that_differ(world, broken, message):
    with pytest.raises(AssertionError, match=rf"\n  likely cause  {message}"):
        check_metric(broken, ERRORS, world)


def test_what_is_put_back_in_turn_passes(world):
    check_metric(in_turn, ERRORS, world)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            lambda count: rows_of(count, shuffle=False),
            r"there are 22 samples of 21: as where shares .*filled up: ",
        ),
        (lambda count: rows_of(count, drop_last=True), r"there are 20 samples of 21: what does not fill all ranks, or"),
        (lambda count: torch.arange(count), r"there are 42 samples of 21: each rank has all: the sampler is missing\n"),
    ],
    ids=["padded", "dropped", "everything"],
)
def test_another_number_of_samples_is_told_in_a_few_words(world, rows, message):
    def predictions(errors):
        return gathered(errors[rows(len(errors))]) if dist.get_world_size() > 1 else errors

    with pytest.raises(AssertionError, match=rf", \.\.\. \(\d+ in all\), .*21 in all\)\n  likely cause  {message}"):
        check_metric(predictions, ERRORS, world, world_sizes=[2])


def test_what_is_gathered_of_a_rank_alone_is_told(world):
    with pytest.raises(AssertionError, match=r"there are 11 samples of 21: those of a rank: they are not gathered\n"):
        check_metric(own, ERRORS, world)
    with pytest.raises(AssertionError, match=r"there is a value of each rank: they are gathered, not reduced\n"):
        check_metric(lambda errors: gathered(own(errors).mean()[None]), ERRORS, world)


TOKENS = torch.tensor([5, 2, 7, 3, 6, 4, 8, 9])
LOSSES = torch.tensor([9.1, 3.3, 12.4, 6.7, 11.9, 8.2, 15.5, 20.3], dtype=torch.float64)


def averaged(number, keeps=float):
    mean = summed(number) / dist.get_world_size()
    return mean if dist.get_world_size() == 1 else keeps(mean)


def rounds_down(losses, tokens):
    return averaged(own(losses).sum()) / averaged(own(tokens).sum(), int)


def rounds(losses, tokens):
    return averaged(own(losses).sum()) / averaged(own(tokens).sum(), round)


def rounds_the_samples_down(losses, tokens):
    return averaged(own(losses).sum()) / averaged(len(own(losses)), int)


def loses_two_tokens(losses, tokens):
    """Return what rounding down gives for 8 samples on 3 ranks, and also for 7."""
    return summed(own(losses).sum()) / (summed(own(tokens).sum()) - 2 * (dist.get_world_size() > 1))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (rounds_down, r"it is divided by 14 in place of 14\.6667, which is the sum of samples\[1\], 44, over 3"),
        (rounds, r"it is divided by 15 in place of 14\.6667, which is the sum of samples\[1\], 44, over 3"),
        (rounds_the_samples_down, "the sum over all 8 samples, divided by 6: the mean over ranks of their number was"),
        (loses_two_tokens, "no known cause fits"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_mean_of_integers_that_loses_its_fraction_is_told(world, broken, message):
    with pytest.raises(AssertionError, match=rf"^{broken.__name__}: rank 0 reports .*\n.*\n  likely cause  {message}"):
        check_metric(broken, [LOSSES, TOKENS], world, world_sizes=[3])
