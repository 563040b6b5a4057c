"""The check of metrics on programs that run without a process group, on wrong references, and on very few samples."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.checks import check_metric
from pdlcheck.worlds import get_world

ERRORS = [torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.5])]


def own(tensor):
    return tensor[dist.get_rank() :: dist.get_world_size()]


def mean_of(total, count):
    sums = torch.tensor([float(total), float(count)], dtype=torch.float64)
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def mean(errors):
    return mean_of(own(errors).sum(), len(own(errors)))


def with_or_without_a_group(change=lambda value: value):
    """Return an evaluation of which only the part with a process group has the fault ``change``."""

    def evaluate(errors):
        return change(mean(errors)) if dist.is_initialized() else float(errors.mean())

    return evaluate


def test_what_runs_without_a_process_group_is_the_reference(world):
    check_metric(with_or_without_a_group(), ERRORS, world)
    message = (
        r"^evaluate: rank 0 reports 7\.28.*, one process on all 7 samples reports 3\.64.*\n.*\n"
        r"  one rank +it reports 7\.28\d*, as these ranks do; evaluate without a process group is what is compared "
    )
    with pytest.raises(AssertionError, match=message):
        check_metric(with_or_without_a_group(lambda value: 2 * value), ERRORS, world, world_sizes=[3])


def reports_nothing(errors):
    return mean(errors) if dist.is_initialized() else None


def makes_a_group(errors):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return mean(errors)


@pytest.mark.parametrize("subject", [mean, reports_nothing, makes_a_group])
def test_what_needs_a_process_group_gets_one(world, subject):
    check_metric(subject, ERRORS, world)
    with pytest.raises(AssertionError, match="times too large: summed, not averaged") as caught:
        check_metric(lambda errors: subject(errors) * dist.get_world_size(), ERRORS, world)
    assert "one rank" not in str(caught.value)


def test_a_reference_that_is_wrong_itself_is_told(world):
    def reference(errors):
        return float(errors.mean()) + 0.125

    with pytest.raises(AssertionError, match=r"\n  one rank +it reports 3.64.*, as these ranks do; ") as caught:
        check_metric(mean, ERRORS, world, reference=reference)
    assert caught.value.cause.startswith(
        "one rank reports the same as these ranks: they share the samples rightly, and"
    )


def test_a_fault_of_several_ranks_is_not_told_as_one_of_the_reference(world):
    def shifted(errors):
        return mean(errors) + (0.125 if dist.get_world_size() > 1 else 0)

    with pytest.raises(AssertionError, match="no known cause fits") as caught:
        check_metric(shifted, ERRORS, world, reference=torch.mean)
    assert "one rank" not in str(caught.value).replace('"as on one rank"', "")


def weighted(errors):
    """Multiply the mean of no samples, which is NaN, by 0."""
    return mean_of(own(errors).mean() * len(own(errors)), len(own(errors)))


def squeezed(errors):
    """Lose the number of samples of a share if it is 1."""
    share = own(errors)[:, None].squeeze()
    return mean_of(share.sum(), len(share) if share.dim() else 0)


def starts_at_5(errors):
    largest = torch.tensor(max([float(one) for one in own(errors)], default=5.0))
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


NONE = "with a sample on each rank it is right, with none on a rank it is wrong"
ONE = "with more samples on each rank it is right, with one on each it is wrong: a dimension of size 1 is squeezed"


@pytest.mark.parametrize(
    ("broken", "world_size", "cause", "samples"),
    [(weighted, 3, NONE, 2), (starts_at_5, 3, NONE, 2), (squeezed, 3, ONE, 3)],
)
def test_a_fault_of_very_few_samples_is_seen(world, broken, world_size, cause, samples):
    with pytest.raises(AssertionError, match=rf"likely cause +{cause}[\s\S]* samples={samples}$"):
        check_metric(broken, [torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 9.0])], world, world_sizes=[world_size])


def test_a_program_may_be_made_for_more_samples(world):
    with pytest.raises(AssertionError, match=r"\n  do +pass min_samples=3 if there are never so few samples\n"):
        check_metric(weighted, ERRORS, world, world_sizes=[3])
    check_metric(weighted, ERRORS, world, world_sizes=[3], min_samples=3)
    with pytest.raises(AssertionError, match="with one on each it is wrong"):
        check_metric(squeezed, ERRORS, world, world_sizes=[3], min_samples=3)


def leaves_early(errors):
    """Take no part in the sum on a rank without samples."""
    return mean(errors) if len(own(errors)) else None


def refuses(errors):
    if len(errors) < 4:
        raise ValueError("needs four samples")
    return mean(errors)


@pytest.mark.parametrize("subject", [leaves_early, refuses])
def test_a_program_may_refuse_very_few_samples(subject):
    check_metric(subject, ERRORS, get_world("sim"))
