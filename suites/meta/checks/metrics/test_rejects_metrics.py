"""The check of metrics rejects broken metrics, names the cause, and accepts the correct twin."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pdlcheck.checks import check_metric
from pdlcheck.errors import Inconclusive

ERRORS = [torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.5])]


def own(tensor):
    return tensor[dist.get_rank() :: dist.get_world_size()]


def own_block(tensor):
    return torch.tensor_split(tensor, dist.get_world_size())[dist.get_rank()]


def reduced(*numbers, op=dist.ReduceOp.SUM):
    total = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(total, op)
    return total.tolist()


def sum_and_count(errors):
    total, count = reduced(own(errors).sum(), len(own(errors)))
    return total / count


def in_blocks(errors):
    total, count = reduced(own_block(errors).sum(), len(own_block(errors)))
    return total / count


def on_rank_0_alone(errors):
    """Return the mean over all samples on one rank only."""
    mean = sum_and_count(errors)
    return mean if dist.get_rank() == 0 else None


def gathered(errors):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own(errors))
    return torch.cat(parts).mean()


def of_several_kinds(errors):
    return {
        "mean": sum_and_count(errors),
        "count": int(reduced(len(own(errors)))[0]),
        "largest": [reduced(own(errors).max(), op=dist.ReduceOp.MAX)[0]],
        "unit": "s",
    }


def scores(model, inputs, targets):
    """Return accuracy and loss, computed in batches as in evaluation loops."""
    right = loss = count = 0
    for x, y in zip(own(inputs).split(2), own(targets).split(2), strict=True):
        out = model(x)
        right += (out.argmax(1) == y).sum().item()
        loss += nn.functional.cross_entropy(out, y, reduction="sum").item()
        count += len(x)
    right, loss, count = reduced(right, loss, count)
    return {"accuracy": right / count, "loss": loss / count}


@pytest.mark.parametrize("subject", [sum_and_count, in_blocks, on_rank_0_alone, gathered, of_several_kinds])
def test_what_is_right_passes(subject, world):
    check_metric(subject, ERRORS, world, world_sizes=(2, 3, 4))


def test_an_evaluation_loop_passes(world):
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def evaluate(inputs, targets):
        with torch.no_grad():
            return scores(model, inputs, targets)

    check_metric(evaluate, (torch.randn(11, 3), torch.arange(11) % 4), world)


def mean_of_means(errors):
    return reduced(own(errors).mean())[0] / dist.get_world_size()


def mean_of_means_of_blocks(errors):
    return reduced(own_block(errors).mean())[0] / dist.get_world_size()


def own_share(errors):
    return own(errors).mean()


def of_rank_0(errors):
    return own(errors).mean() if dist.get_rank() == 0 else None


def summed(errors):
    return sum_and_count(errors) * dist.get_world_size()


def divided_twice(errors):
    return sum_and_count(errors) / dist.get_world_size()


def padded(errors):
    """Return the mean over the samples of a DistributedSampler, which pads."""
    loader = DataLoader(TensorDataset(errors), sampler=DistributedSampler(TensorDataset(errors), shuffle=False))
    values = torch.cat([batch for (batch,) in loader])
    total, count = reduced(values.sum(), len(values))
    return total / count


def dropped(errors):
    sampler = DistributedSampler(TensorDataset(errors), shuffle=False, drop_last=True)
    values = errors[list(sampler)]
    total, count = reduced(values.sum(), len(values))
    return total / count


def count_is_of_one_rank(errors):
    mean = sum_and_count(errors)
    return {"mean": mean, "count": len(own(errors))}


def nothing_on_several_ranks(errors):
    mean = sum_and_count(errors)
    return mean if dist.get_world_size() == 1 else None


def another_number_of_values(errors):
    return [sum_and_count(errors)] * dist.get_world_size()


def integers_for_means(errors):
    """Round the mean down, as integer tensors do."""
    total = torch.tensor([int(own(errors).sum()), len(own(errors))])
    dist.all_reduce(total)
    return float(total[0] // total[1]) if dist.get_world_size() > 1 else float(total[0] / total[1])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (mean_of_means, r"rank 0 reports 3\.645833, one process on all 7 .*\n(.*\n)*.*mean of the ranks' values"),
        (mean_of_means_of_blocks, "likely cause  the mean of the ranks' values, each counted once: weigh them"),
        (own_share, r"likely cause  the value of the samples of rank 0 alone: it was not reduced"),
        (of_rank_0, r"likely cause  the value of the samples of rank 0 alone: it was not reduced"),
        (summed, "likely cause  world_size = 2 times too large: summed, not averaged"),
        (divided_twice, "likely cause  world_size = 2 times too small: divided twice"),
        (padded, "likely cause  the first sample counts twice, as a sampler pads to 8"),
        (dropped, "likely cause  the last sample counts not at all, as a sampler drops what does not fill all ranks"),
        (count_is_of_one_rank, r"rank 0 reports 4 at \['count'\], one process on all 7 samples reports 7"),
        (nothing_on_several_ranks, r"no rank reports anything, one process reports 3\.642857\n"),
        (another_number_of_values, r"rank 0 reports 3.642857 at \[0\], 3.642857 at \[1\], one process reports"),
        (integers_for_means, r"rank 0 reports 3, one process on all 7 samples reports 3\.571429"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_broken_is_rejected(broken, message, world):
    with pytest.raises(AssertionError, match=message):
        check_metric(broken, ERRORS, world)


@pytest.mark.parametrize("broken", [padded, mean_of_means])
def test_every_cause_that_gives_the_very_number_is_named(broken, world):
    """For the samples 1, 1 and 4, the mean with the first sample twice equals the mean of 2.5 and 1."""
    with pytest.raises(AssertionError, match=r"mean of the ranks' values.*; \(2\) the first sample counts twice"):
        check_metric(broken, [torch.tensor([1.0, 1.0, 4.0])], world, world_sizes=[2])


def reported(change, *, by_one=lambda report: report):
    """Return an evaluation that reports the mean and the count.

    ``change`` alters the report of ranks, and ``by_one`` that of one process.
    """

    def evaluate(errors):
        report = {"mean": sum_and_count(errors), "more": [float(len(errors)), None]}
        return change(report) if dist.get_world_size() > 1 else by_one(report)

    return evaluate


def nothing_on_others(report):
    return report if dist.get_rank() == 0 else {"mean": None, "more": [None, None]}


def each_reports_a_part(report):
    return report | ({"mean": None} if dist.get_rank() else {"more": [None, None]})


def test_ranks_may_report_none_in_the_place_of_what_others_report(world):
    for change in (lambda report: report, nothing_on_others, each_reports_a_part):
        check_metric(reported(change), ERRORS, world)


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        (reported(lambda report: report | {"mean": None}), r"rank 0 reports None at \['mean'\], one process on all 7"),
        (
            reported(lambda report: report | {"more": [7.0, 1.0]}, by_one=lambda report: report),
            r"rank 0 reports 1 at \['more'\]\[1\], one process on all 7 samples reports None\n",
        ),
        (reported(lambda report: {"mean": None, "more": [None] * 2}), r"no rank reports anything, one process reports"),
        (reported(lambda report: {"mean": report["mean"]}), r"rank 0 reports 3.64\d* at \['mean'\], one process"),
    ],
    ids=["nobody", "a number for none", "nothing", "left out"],
)
def test_what_no_rank_reports_is_seen(subject, message, world):
    with pytest.raises(AssertionError, match=message):
        check_metric(subject, ERRORS, world)


def test_none_alone_is_inconclusive(world):
    with pytest.raises(Inconclusive, match="reports nothing in one process"):
        check_metric(reported(lambda report: report, by_one=lambda report: {"mean": None}), ERRORS, world)


def test_samples_that_fill_all_ranks_hide_nothing(world):
    """The check uses seven of the eight samples, because seven are uneven over two ranks."""
    with pytest.raises(AssertionError, match="samples=7"):
        check_metric(mean_of_means, [torch.arange(8.0) ** 2], world, world_sizes=[2])


@pytest.mark.parametrize("count", [6, 7, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_for_which_a_mean_of_means_is_right_by_chance_hide_nothing(world, count, dtype):
    """Both ranks have the mean 3 if the samples are the numbers from 0 to 6."""
    samples = [torch.arange(count, dtype=dtype)]
    check_metric(sum_and_count, samples, world)
    check_metric(of_several_kinds, samples, world)
    for broken in (mean_of_means, mean_of_means_of_blocks):
        with pytest.raises(AssertionError, match="likely cause  the mean of the ranks' values, each counted once"):
            check_metric(broken, samples, world)
    with pytest.raises(AssertionError, match=r"order=last_sample_first$"):
        check_metric(mean_of_means, samples, world)


def test_samples_keep_their_order_where_it_hides_nothing(world):
    """A metric may need the order of its samples; here the first is the smallest."""

    def spread(errors):
        assert errors[0] == 1.0
        return {"mean": sum_and_count(errors), "first": float(errors[0]) * sum_and_count(errors)}

    check_metric(spread, [torch.tensor([1.0, 3.0, 4.0, 1.0, 5.0, 9.0, 2.5])], world)


def test_batches_that_count_the_same_need_a_reference(world):
    def mean_over_batches(errors):
        means = [batch.mean() for batch in own(errors).split(2)]
        total, count = reduced(sum(means), len(means))
        return total / count

    with pytest.raises(AssertionError, match=r"one process on all 7 samples reports 3\.642857"):
        check_metric(mean_over_batches, ERRORS, world, reference=torch.mean)
    check_metric(sum_and_count, ERRORS, world, reference=torch.mean)


def test_values_that_cancel_are_no_alarm(world):
    """The mean of these samples is nothing but rounding."""
    errors = torch.tensor([0.1, 0.2, 0.3, -0.6, 0.7, -0.1, -0.2, -0.4])
    check_metric(sum_and_count, [torch.cat([errors, torch.zeros(1)])], world)


@pytest.mark.parametrize(
    ("subject", "samples", "message"),
    [
        (sum_and_count, torch.ones(5), "reports the same for every share of the samples"),
        (lambda errors: None, ERRORS[0], "reports nothing in one process"),
        (lambda errors: sum_and_count(errors) * torch.nan, ERRORS[0], "reports nan in one process"),
    ],
)
def test_what_shows_nothing_is_inconclusive(subject, samples, message, world):
    with pytest.raises(Inconclusive, match=message):
        check_metric(subject, [samples], world)


@pytest.mark.parametrize(
    ("samples", "sizes", "message"),
    [
        ([torch.ones(1)], (2,), "same number of samples, 2 or more; got 1$"),
        ([], (2,), "got none$"),
        ([torch.ones(3), torch.ones(4)], (2,), "got 3, 4$"),
        (ERRORS, (1, 2), r"world_sizes must be 2 or more, got \(1, 2\)"),
        (ERRORS, (), r"got \(\)"),
    ],
)
def test_arguments_that_cannot_be_are_named(samples, sizes, message, world):
    with pytest.raises(ValueError, match=message):
        check_metric(sum_and_count, samples, world, world_sizes=sizes)


def test_samples_are_a_list_of_tensors(world):
    with pytest.raises(TypeError, match=r"takes as samples a list of tensors, .*; pass \[samples\]"):
        check_metric(sum_and_count, ERRORS[0], world)
