"""A pipeline of stages takes the steps of one process: gradients, outputs, losses, tied parameters, replicas."""

from __future__ import annotations

import itertools
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pdlcheck.checks import check_pipeline
from pdlcheck.primitives.pipeline.messages import BOTH_WAYS

from .models import MSE, SUM, dropout_net, few, samples, side_by_side, starter, tanh_net, tied_net

pytestmark = pytest.mark.verifies("Pipeline")


# gradients, outputs, losses


@few
@given(data=st.data(), schedule=st.sampled_from(["1f1b", "gpipe"]), loss=st.sampled_from([MSE, SUM]))
def test_a_pipeline_takes_the_steps_of_one_process(subject, world, data, schedule, loss):
    n_stages = data.draw(st.integers(1, 4))
    n_microbatches = data.draw(st.integers(1, 6))
    layers = data.draw(st.integers(n_stages, 5))
    sizes = data.draw(st.lists(st.integers(n_microbatches, 11), min_size=2, max_size=3))
    start = starter(
        subject,
        loss,
        schedule=schedule,
        n_microbatches=n_microbatches,
        recompute=data.draw(st.booleans()),
        split=data.draw(st.sampled_from(["parameters", sorted(2 * i for i in range(1, n_stages))])),
    )
    check_pipeline(
        start,
        partial(tanh_net, layers),
        loss,
        [samples(size, seed=i) for i, size in enumerate(sizes)],
        world,
        world_size=n_stages,
        n_microbatches=n_microbatches,
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    )


@few
@given(n_ranks=st.integers(1, 3), rounds=st.integers(1, 3), stages_per_rank=st.integers(1, 3), more=st.integers(0, 4))
def test_interleaved_stages_take_the_steps_of_one_process(subject, world, n_ranks, rounds, stages_per_rank, more):
    start = starter(
        subject, MSE, schedule="interleaved", n_microbatches=n_ranks * rounds, stages_per_rank=stages_per_rank
    )
    batches = [samples(n_ranks * rounds + more, seed=seed) for seed in range(2)]
    check_pipeline(
        start,
        partial(tanh_net, n_ranks * stages_per_rank),
        MSE,
        batches,
        world,
        world_size=n_ranks,
        n_microbatches=n_ranks * rounds,
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
@pytest.mark.parametrize("semantics", ["rendezvous", "buffered", "gloo", "nccl"])
def test_no_semantics_of_messages_lets_a_pipeline_wait_for_ever(subject, schedule, semantics):
    from pdlcheck.worlds import get_world

    start = starter(subject, MSE, schedule=schedule, n_microbatches=4)
    sim = get_world("sim", semantics=semantics)
    check_pipeline(start, tanh_net, MSE, [samples(9)], sim, world_size=2, n_microbatches=4)


@pytest.mark.parametrize("schedule", ["random:1", "random:2", "pct:3,3,400"])
def test_ranks_may_come_in_any_order(subject, schedule):
    from pdlcheck.worlds import get_world

    start = starter(subject, MSE, schedule="1f1b", n_microbatches=5)
    sim = get_world("sim", schedule=schedule, semantics="nccl")
    check_pipeline(start, tanh_net, MSE, [samples(9), samples(5)], sim, world_size=4, n_microbatches=5)


@pytest.mark.parametrize("schedule", ["first", "random:1", "pct:2,3,400"])
@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved"])
def test_receives_may_be_posted_before_the_pass_where_directions_are_apart(subject, schedule, kind):
    """Receives are posted early on gloo and MPI; here also under sends that wait for their receives."""
    from pdlcheck.worlds import get_world

    def start(model):
        pipeline = subject(model, MSE, schedule=kind, n_microbatches=4)
        pipeline._passes.messages.ahead = True

        def step(inputs, targets):
            result = pipeline.step(inputs, targets)
            return result.loss, result.outputs

        return pipeline.module, step

    sim = get_world("sim", schedule=schedule)
    check_pipeline(start, tanh_net, MSE, [samples(9)] * 2, sim, world_size=2, n_microbatches=4)


def test_they_are_on_mpi_too():
    backend = pytest.importorskip("pdlcheck.worlds.mpi.backend", reason="needs MPI: pip install 'pdlcheck[mpi]'")
    assert backend.BACKEND in BOTH_WAYS


def ignoring_loss(out, labels):
    return nn.functional.cross_entropy(out, labels, ignore_index=-1)


def test_a_mean_over_some_of_the_targets_is_weighted_with_their_number(subject, world):
    x, _ = samples(8)
    labels = torch.tensor([0, -1, -1, -1, 2, 1, 0, -1])
    start = starter(subject, ignoring_loss, n_microbatches=4, loss_weight=lambda part: (part >= 0).sum().item())
    # the second micro-batch has no target that counts, so its own mean is NaN
    check_pipeline(start, tanh_net, ignoring_loss, [(x, labels)] * 2, world, world_size=2, n_microbatches=4)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(ignore_index=3, weight=torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64), label_smoothing=0.2),
        nn.NLLLoss(weight=torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)),
        nn.CrossEntropyLoss(ignore_index=3, reduction="sum"),
    ],
    ids=["ignored", "ignored and weighted", "smoothed", "log likelihood", "sum"],
)
def test_losses_that_do_not_count_all_targets_alike_are_those_of_one_process(subject, world, loss):
    x, _ = samples(7, width=4)
    labels = torch.tensor([0, -100, 3, 3, 2, 1, 3] if loss.ignore_index == -100 else [0, 1, 3, 3, 2, 1, 3])
    labels = labels.abs() % 4 if loss.weight is not None else labels
    start, make = starter(subject, loss, n_microbatches=3), partial(tanh_net, width=4)
    check_pipeline(start, make, loss, [(x, labels)] * 2, world, world_size=2, n_microbatches=3)


def test_probabilities_of_classes_count_alike(subject, world):
    x, y = samples(7)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    start = starter(subject, loss, n_microbatches=3)
    check_pipeline(start, tanh_net, loss, [(x, y.softmax(1))], world, world_size=2, n_microbatches=3)


def test_a_partial_says_whether_it_adds(subject, world):
    loss = partial(nn.functional.mse_loss, reduction="sum")
    start = starter(subject, loss, n_microbatches=2)
    check_pipeline(start, tanh_net, SUM, [samples(5)], world, world_size=2, n_microbatches=2)


def test_gradients_accumulate_over_steps(subject, world):
    """Tied parameters accumulate too: only the parts of the current step are summed over the stages."""

    def accumulate():
        torch.manual_seed(0)
        pipeline = subject(tied_net().double(), MSE, n_microbatches=2)
        x, y = (t.double() for t in samples(4))
        pipeline.step(x, y)
        once = {name: p.grad.clone() for name, p in pipeline.module.named_parameters()}
        pipeline.step(x, y)
        return max(float((p.grad - 2 * once[name]).abs().max()) for name, p in pipeline.module.named_parameters())

    assert max(world.run(accumulate, world_size=2)) < 1e-14


# tied parameters, data parallel


@pytest.mark.parametrize(("schedule", "world_size"), [("1f1b", 2), ("1f1b", 3), ("gpipe", 3), ("interleaved", 2)])
def test_tied_copies_get_the_sum_of_their_gradients_and_stay_equal(subject, world, schedule, world_size):
    def make():
        if schedule != "interleaved":
            return tied_net()
        model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(6)))
        for position in (2, 5):  # on both ranks, and twice on the first
            model[position].weight = model[0].weight
        return model

    keywords = {"split": [1, 2, 3]} if schedule == "interleaved" else {}
    start = starter(subject, SUM, schedule=schedule, n_microbatches=4, **keywords)
    batches = [samples(5, seed=seed) for seed in range(3)]
    lr = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    check_pipeline(start, make, SUM, batches, world, world_size=world_size, n_microbatches=4, optimizer=lr)


def test_tied_copies_start_alike_when_ranks_draw_their_own_weights(subject, world):
    def first_weights():
        torch.manual_seed(dist.get_rank())
        return subject(tied_net(), MSE, n_microbatches=1).module

    first, second = world.run(first_weights, world_size=2)
    assert torch.equal(dict(first.named_parameters())["0.weight"], dict(second.named_parameters())["4.weight"])


@pytest.mark.parametrize("loss", [MSE, SUM], ids=["mean", "sum"])
@pytest.mark.parametrize(
    ("make", "schedule"),
    # the tied network has too few layers for four stages
    [*itertools.product([tanh_net, tied_net], ["gpipe", "1f1b"]), (tanh_net, "interleaved")],
    ids=["plain-gpipe", "plain-1f1b", "tied-gpipe", "tied-1f1b", "plain-interleaved"],
)
def test_two_pipelines_on_uneven_halves_of_the_batch_are_one(subject, world, loss, make, schedule):
    """With 2 x 2 ranks, 0 and 1 are one pipeline, 2 and 3 the other; stages meet in sub-groups."""

    def start(model):
        rank = dist.get_rank()
        pipelines = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        stages = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        if rank > 1:
            for parameter in model.parameters():
                nn.init.zeros_(parameter)  # weights come from the first pipeline
        groups = {"group": pipelines[rank // 2], "data_group": stages[rank % 2]}
        pipeline = subject(model, loss, schedule=schedule, n_microbatches=2, **groups)

        def step(inputs, targets):
            half = slice(0, 3) if rank < 2 else slice(3, None)
            pipeline.step(inputs[half], targets[half])

        return pipeline.module, step

    batches = [samples(8, seed=seed) for seed in range(2)]
    lr = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
    check_pipeline(start, make, loss, batches, world, world_size=4, n_microbatches=2, results=False, optimizer=lr)


class SlowOnOne(nn.Linear):
    """A layer that is slow in one of two pipelines."""

    def __init__(self, pipeline):
        super().__init__(3, 3)
        self.pipeline = pipeline

    def forward(self, x):
        if dist.get_rank() // 2 == self.pipeline:
            time.sleep(0.02)
        return super().forward(x)


@pytest.mark.if_subject_takes("sample")
def test_pipelines_side_by_side_are_cut_as_the_first_one_measures(subject, world):
    x, y = samples(4)

    def cut():
        model = nn.Sequential(SlowOnOne(0), nn.Linear(3, 3), SlowOnOne(1))
        groups = side_by_side(dist.get_rank())
        pipeline = subject(model, MSE, n_microbatches=2, split="time", sample=x, **groups)
        pipeline.step(x, y)
        return pipeline.stages

    assert world.run(cut, world_size=4) == [[["0"], ["1", "2"]]] * 4


# inference


def test_infer_returns_the_outputs_in_order_and_leaves_no_trace(subject, world):
    x, y = samples(7)

    def infer():
        torch.manual_seed(0)
        pipeline = subject(tanh_net(), MSE, n_microbatches=3)
        pipeline.module.eval()
        result = pipeline.infer(x if dist.get_rank() == 0 else None)
        both = pipeline.infer(x, y)
        assert all(p.grad is None for p in pipeline.module.parameters())
        return result, both

    torch.manual_seed(0)
    expected = tanh_net()(x)
    *others, (last, both) = world.run(infer, world_size=3)
    assert all(result.outputs is None and result.loss is None for pair in others for result in pair)
    assert torch.allclose(last.outputs, expected)
    assert last.loss is None
    assert torch.allclose(both.loss, MSE(expected, y))
    assert not last.outputs.requires_grad


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_rank_alone_may_change_its_mode(subject, world, rank):
    x, y = samples(6)

    def train():
        torch.manual_seed(0)
        pipeline = subject(dropout_net(), MSE, n_microbatches=2, split=[3, 5])
        pipeline.step(x, y)
        pipeline.module.train(dist.get_rank() != rank)
        pipeline.step(x, y)
        return [int(m.num_batches_tracked) for m in pipeline.module.modules() if isinstance(m, nn.BatchNorm1d)]

    assert world.run(train, world_size=3) == [[2 if rank == 0 else 4], [], []]


def test_outputs_may_be_left_out(subject, world):
    def step():
        result = subject(tanh_net(), MSE, n_microbatches=2).step(*samples(4), keep_outputs=False)
        return result.outputs, result.loss is None

    assert world.run(step, world_size=2) == [(None, True), (None, False)]


def test_batch_norm_and_dropout_are_not_run_an_extra_time(subject, world):
    """The pass on zeros that determines shapes does not change buffers and random numbers."""

    def counted():
        pipeline = subject(dropout_net(), MSE, n_microbatches=3)
        torch.manual_seed(5)
        outputs = pipeline.infer(*samples(6)).outputs
        torch.manual_seed(5)
        again = pipeline.infer(*samples(6)).outputs
        assert outputs is None or torch.equal(outputs, again)
        return [int(m.num_batches_tracked) for m in pipeline.module.modules() if isinstance(m, nn.BatchNorm1d)]

    assert [count for counts in world.run(counted, world_size=2) for count in counts] == [6]
