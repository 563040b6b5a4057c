"""The check of metrics detects that a tail is repeated or dropped, even if the metric of the given samples hides it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from pdlcheck.checks import check_metric


def exact(count):
    return list(range(dist.get_rank(), count, dist.get_world_size()))


def padded(count):
    return list(DistributedSampler(range(count), shuffle=False))


def padded_with_the_last(count):
    return [
        min(place, count - 1)
        for place in range(dist.get_rank(), count + -count % dist.get_world_size(), dist.get_world_size())
    ]


def dropped(count):
    return list(DistributedSampler(range(count), shuffle=False, drop_last=True))


def f1(share):
    """Return an evaluation of the F1 score, which true negatives do not change."""

    def evaluate(found, true):
        own = share(len(found))
        found, true = found[own], true[own]
        counts = torch.stack([(found & true).sum(), (found & ~true).sum(), (~found & true).sum()]).double()
        dist.all_reduce(counts)
        return float(2 * counts[0] / (2 * counts[0] + counts[1] + counts[2]))

    return evaluate


def largest(share):
    def evaluate(errors):
        worst = errors[share(len(errors))].max()
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return {"largest": float(worst), "unit": "s", "parts": 3}

    return evaluate


def labels(*positives):
    return torch.isin(torch.arange(11), torch.tensor(positives))


# true negatives are first and last; the other samples are in the middle
GUESSES = [labels(2, 3, 5), labels(3, 5, 8)]
TWO_OF_A_KIND = [labels(5, 6), labels(5, 6, 7, 8)]  # F1 stays the same if each kind comes twice
ERRORS = [torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.5, 6.0, 5.0, 3.0, 5.0])]
FIRST, LAST = "the first sample counts twice, as a sampler pads", "the last sample counts twice, as a sampler pads"
NOT_AT_ALL = "the last sample counts not at all, as a sampler drops"


@pytest.mark.slow
@pytest.mark.parametrize("samples", [GUESSES, TWO_OF_A_KIND], ids=["guesses", "two of a kind"])
@pytest.mark.parametrize(
    ("share", "cause", "place"),
    [(padded, FIRST, "first"), (padded_with_the_last, LAST, "last"), (dropped, NOT_AT_ALL, "last")],
)
def test_a_tail_of_true_negatives_hides_nothing(world, samples, share, cause, place):
    check_metric(f1(exact), samples, world)
    with pytest.raises(AssertionError, match=rf"rank 0 reports .*\n.*\n.*{cause}[\s\S]*order=sample_\d+_{place}$"):
        check_metric(f1(share), samples, world)


@pytest.mark.slow
@pytest.mark.parametrize("world_sizes", [(2, 3), (2,), (4,)])
def test_a_sampler_that_drops_the_largest_is_seen_wherever_that_is(world, world_sizes):
    for places in (range(11), range(10, -1, -1), torch.arange(11).roll(3)):
        samples = [ERRORS[0][torch.tensor(list(places))]]
        check_metric(largest(exact), samples, world, world_sizes=world_sizes)
        with pytest.raises(AssertionError, match=r"rank 0 reports [56] at \['largest'\], one process .* reports 9\n"):
            check_metric(largest(dropped), samples, world, world_sizes=world_sizes)


def test_a_largest_number_may_come_twice(world):
    """A repeated largest number is correct if a sampler pads."""
    check_metric(largest(padded), ERRORS, world)
    check_metric(largest(padded), ERRORS, world, reference=lambda errors: largest_of_one(errors))


def largest_of_one(errors):
    return {"largest": float(errors.max()), "unit": "s", "parts": 3}


def test_other_orders_are_few(world):
    """Each order runs the program once more."""
    asked = []

    def reference(errors):
        asked.append(len(errors))
        return largest_of_one(errors)

    check_metric(largest(exact), [torch.arange(1000.0).roll(500)], world, reference=reference)
    assert len(asked) < 150


def test_a_program_that_needs_its_samples_in_order_keeps_it(world):
    def evaluate(errors):
        if errors[0] != 3.0:
            raise ValueError("not sorted")
        return largest(exact)(errors)

    check_metric(evaluate, ERRORS, world)
