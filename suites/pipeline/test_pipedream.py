"""PipeDream takes the steps that its own rule defines."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pdlcheck.checks import check_pipedream
from pdlcheck.primitives.pipeline import one_f_one_b, pipedream

from .models import MSE, SGD, few, samples, side_by_side, starter, tanh_net

pytestmark = pytest.mark.verifies("Pipeline")
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@few
@given(
    n_stages=st.integers(2, 4),
    more=st.integers(2, 5),
    vertical_sync=st.booleans(),
    recompute=st.booleans(),
    optimizer=st.sampled_from([SGD, MOMENTUM, partial(torch.optim.Adam, lr=0.05)]),
)
def test_pipedream_takes_the_steps_of_its_rule(subject, world, n_stages, more, vertical_sync, recompute, optimizer):
    n_microbatches = 2 * n_stages + more
    start = starter(
        subject,
        MSE,
        schedule="pipedream",
        n_microbatches=n_microbatches,
        optimizer=optimizer,
        vertical_sync=vertical_sync,
        recompute=recompute,
        split="parameters",
    )
    check_pipedream(
        start,
        partial(tanh_net, n_stages),
        MSE,
        samples(n_microbatches * 2 + 1),
        world,
        world_size=n_stages,
        n_microbatches=n_microbatches,
        optimizer=optimizer,
        vertical_sync=vertical_sync,
    )


def counted_loss(out, labels):
    return nn.functional.cross_entropy(out, labels, ignore_index=1, reduction="sum") / (labels != 1).sum().clamp(min=1)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_a_micro_batch_that_does_not_count_is_a_step_with_gradients_of_zero(subject, world, recompute):
    """Momentum moves the weights in every stage."""
    labels = torch.arange(18) % 3
    labels[6:8] = 1  # the mean of the fourth micro-batch is NaN
    start = starter(
        subject,
        nn.CrossEntropyLoss(ignore_index=1),
        schedule="pipedream",
        n_microbatches=9,
        optimizer=MOMENTUM,
        loss_weight=lambda part: float((part != 1).sum()),
        recompute=recompute,
    )
    batch = samples(18)[0], labels
    keywords = {"world_size": 2, "n_microbatches": 9, "optimizer": MOMENTUM}
    check_pipedream(start, tanh_net, counted_loss, batch, world, **keywords)


def test_pipedream_on_one_rank_is_plain_sgd(subject, world):
    x, y = samples(6)

    def train():
        torch.manual_seed(0)
        model = tanh_net()
        subject(model, MSE, schedule="pipedream", n_microbatches=6, optimizer=MOMENTUM).step(x, y)
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    torch.manual_seed(0)
    model = tanh_net()
    optimizer = MOMENTUM(model.parameters())
    for i in range(6):
        optimizer.zero_grad()
        MSE(model(x[i : i + 1]), y[i : i + 1]).backward()
        optimizer.step()
    (found,) = world.run(train, world_size=1)
    assert torch.equal(found, nn.utils.parameters_to_vector(model.parameters()))


def test_pipedream_stashes_no_more_versions_than_stages_are_left(subject, world):
    def peaks():
        pipeline = subject(tanh_net(), MSE, schedule="pipedream", n_microbatches=12, optimizer=SGD)
        pipeline.step(*samples(12))
        return [stash.peak for stash in pipeline._passes.stashes.values()]

    assert world.run(peaks, world_size=4) == [[4], [3], [2], [1]]


@pytest.mark.if_subject_takes("data_group")
def test_replicas_of_pipedream_stay_equal(subject, world):
    def train():
        rank = dist.get_rank()
        pipelines = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        stages = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        torch.manual_seed(rank)
        keywords = {"schedule": "pipedream", "n_microbatches": 5, "optimizer": SGD}
        pipeline = subject(tanh_net(), MSE, group=pipelines[rank // 2], data_group=stages[rank % 2], **keywords)
        pipeline.step(*samples(5, seed=rank // 2))
        return nn.utils.parameters_to_vector(pipeline.module.parameters()).detach()

    ranks = world.run(train, world_size=4)
    assert torch.equal(ranks[0], ranks[2])
    assert torch.equal(ranks[1], ranks[3])


def steps_alone(model, batches, weights):
    """Return the parameters of one process after one step for each micro-batch.

    A step uses the weighted mean of the micro-batch's parts in all pipelines.
    """
    optimizer = MOMENTUM(model.parameters())
    for number in range(len(weights[0])):
        optimizer.zero_grad()
        total = sum(counted[number] for counted in weights)
        for (x, y), counted in zip(batches, weights, strict=True):
            loss = MSE(model(x[number : number + 1]), y[number : number + 1])
            (loss * (counted[number] / total if total else 0.0)).backward()
        optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.if_subject_takes("loss_weight")
@pytest.mark.parametrize("stages", [1, 2])
def test_a_micro_batch_of_pipedream_counts_as_loss_weight_says_in_all_pipelines(subject, world, stages):
    """Stages that see no targets do the same; a micro-batch of weight 0 everywhere still applies momentum."""
    weights = [[1.0, 0.0, 3.0, 0.0], [3.0, 0.0, 0.0, 1.0]] if stages == 1 else [[1.0], [3.0]]
    count = len(weights[0])
    batches = [samples(count, seed=seed) for seed in range(2)]

    def train():
        rank = dist.get_rank()
        groups = side_by_side(rank) if stages == 2 else {"group": [dist.new_group([one]) for one in range(2)][rank]}
        torch.manual_seed(0)
        left = list(weights[rank // stages])
        keywords = {"schedule": "pipedream", "n_microbatches": count, "optimizer": MOMENTUM}
        groups.setdefault("data_group", dist.group.WORLD)
        pipeline = subject(tanh_net(), MSE, loss_weight=lambda part: left.pop(0), **groups, **keywords)
        pipeline.step(*batches[rank // stages])
        return {name: p.detach() for name, p in pipeline.module.named_parameters()}

    torch.manual_seed(0)
    expected = steps_alone(tanh_net(), batches, weights)
    for held in world.run(train, world_size=2 * stages):
        for name, found in held.items():
            torch.testing.assert_close(found, expected[name], msg=name)


def test_pipedream_is_asynchronous_and_takes_the_order_of_1f1b():
    assert pipedream(3, 5).rows == one_f_one_b(3, 5).rows
