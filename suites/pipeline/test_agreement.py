"""Ranks that make a pipeline from different models or arguments get the same error, which names the difference."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.primitives.pipeline import one_f_one_b

from .models import MSE, SGD, errors, samples, side_by_side, tanh_net, tied_net

pytestmark = pytest.mark.verifies("Pipeline")


def untied():
    model = tied_net()
    model[4].weight = nn.Parameter(model[4].weight.detach().clone())
    return model


def with_buffer(size):
    model = tanh_net()
    model[0].register_buffer("mask", torch.ones(size))
    return model


def frozen_tie():
    model = tied_net()
    model[0].weight.requires_grad_(False)
    return model


def renamed():
    model = tanh_net()
    model[1].register_parameter("scale", nn.Parameter(torch.ones(1)))
    return model


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize(
    ("models", "line"),
    [
        (
            (tied_net, untied),
            "parameter '0.weight': float32 (3, 3), tied to '4.weight' on rank 0, float32 (3, 3) on rank 1",
        ),
        (
            (tied_net, frozen_tie),
            "parameter '0.weight': float32 (3, 3), tied to '4.weight' on rank 0, "
            "float32 (3, 3), tied to '4.weight', frozen on rank 1",
        ),
        (
            (tanh_net, partial(tanh_net, width=5)),
            "parameter '0.weight': float32 (3, 3) on rank 0, float32 (5, 5) on rank 1",
        ),
        (
            (tanh_net, lambda: tanh_net().double()),
            "parameter '0.weight': float32 (3, 3) on rank 0, float64 (3, 3) on rank 1",
        ),
        ((tanh_net, renamed), "parameter '1.scale': not there on rank 0, float32 (1,) on rank 1"),
        (
            (partial(with_buffer, 2), partial(with_buffer, 4)),
            "buffer '0.mask': float32 (2,) on rank 0, float32 (4,) on rank 1",
        ),
    ],
    ids=["tied", "frozen tie", "shape", "dtype", "name", "buffer"],
)
def test_models_that_differ_between_ranks_are_refused_on_every_rank(subject, world, models, line):
    """Regression test: with tied weights, a rank waited for ever for the copy of another rank."""
    found = errors(world, lambda rank: subject(models[rank](), MSE, split=[2], n_microbatches=2).step(*samples(4)))
    assert len(set(found)) == 1
    assert found[0].startswith("ValueError: Pipeline was made otherwise on rank 1 of its group than on rank 0")
    assert f"\n  {line}" in found[0]


def half(targets):
    return len(targets) / 2


PIPEDREAM = {"schedule": "pipedream", "optimizer": SGD}


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize(
    ("keywords", "other", "line"),
    [
        ({}, {"schedule": "gpipe"}, "schedule: 1f1b on rank 0, gpipe on rank 1"),
        ({}, {"n_microbatches": 3}, "n_microbatches: 2 on rank 0, 3 on rank 1"),
        ({}, {"split": [4]}, "layers of the stages: 0, 1 | 2, 3, 4, 5, 6, 7 on rank 0, 0, 1, 2, 3 | 4,"),
        ({}, {"loss": nn.L1Loss()}, "loss: MSELoss on rank 0, L1Loss on rank 1"),
        ({}, {"loss": None}, "loss: MSELoss on rank 0, not given on rank 1"),
        ({}, {"reduction": "sum", "loss": nn.functional.mse_loss}, "reduction: mean on rank 0, sum on rank 1"),
        ({}, {"loss_weight": half}, "loss_weight: not given on rank 0, given on rank 1"),
        ({}, {"recompute": True}, "recompute: False on rank 0, True on rank 1"),
        (PIPEDREAM, {"vertical_sync": True}, "vertical_sync: False on rank 0, True on rank 1"),
        (PIPEDREAM, {"optimizer": partial(torch.optim.Adam, lr=0.1)}, "optimizer: SGD on rank 0, Adam on rank 1"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value) or "nothing",
)
def test_arguments_that_differ_between_ranks_are_refused_on_every_rank(subject, world, keywords, other, line):
    def program(rank):
        own = {"loss": MSE, "n_microbatches": 2, "split": [2], **keywords, **(other if rank else {})}
        subject(tanh_net(), **own)

    found = errors(world, program)
    assert len(set(found)) == 1
    assert found[0].startswith("ValueError: Pipeline was made otherwise on rank 1 of its group than on rank 0")
    assert f"\n  {line}" in found[0]


def test_grids_that_differ_in_their_order_alone_are_shown(subject, world):
    def program(rank):
        grid = one_f_one_b(2, 2)
        rows = ((None, *row) for row in grid.rows) if rank else grid.rows
        subject(tanh_net(), MSE, schedule=type(grid)(grid.name, tuple(rows)))

    found = errors(world, program)
    assert len(set(found)) == 1
    assert "\n  grid on rank 0:\n  1f1b: 2 stages on 2 ranks, 2 micro-batches, 6 steps\n" in found[0]
    assert "\n  grid on rank 1:\n  1f1b: 2 stages on 2 ranks, 2 micro-batches, 7 steps\n" in found[0]


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize(
    ("model", "keywords", "line"),
    [
        (partial(tanh_net, width=5), {}, "parameter '0.weight': float32 (3, 3) on rank 0 in pipeline 0, float32 (5,"),
        (
            lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(), *tanh_net()[2:]),
            {},
            "layer '1': Tanh on rank 0 in pipeline 0, ReLU on rank 0 in pipeline 1",
        ),
        (
            lambda: tanh_net().requires_grad_(False),
            {},
            "parameter '0.weight': float32 (3, 3) on rank 0 in pipeline 0, float32 (3, 3), frozen on rank 0",
        ),
        (
            tanh_net,
            {**PIPEDREAM, "optimizer": partial(torch.optim.SGD, lr=0.2)},
            "arguments of optimizer: lr=0.1 on rank 0 in pipeline 0, lr=0.2 on rank 0 in pipeline 1",
        ),
    ],
    ids=["width", "kind", "frozen", "rate"],
)
def test_pipelines_side_by_side_that_differ_are_refused_on_every_rank(subject, world, model, keywords, line):
    """Regression test: with another width, gloo ended the processes."""

    def program(rank):
        made = tanh_net() if rank < 2 else model()
        own = keywords if rank > 1 or not keywords else PIPEDREAM
        subject(made, MSE, n_microbatches=2, split=[2], **side_by_side(rank), **own)

    found = errors(world, program, 4)
    assert len(set(found)) == 1
    assert f"\n  {line}" in found[0]


@pytest.mark.beyond_contract("error messages")
def test_a_data_group_on_one_rank_alone_is_refused(subject, world):
    def program(rank):
        groups = {"data_group": dist.new_group([0])} if rank == 0 else {"data_group": dist.new_group([0]) and None}
        subject(tanh_net(), MSE, n_microbatches=2, **groups)

    found = errors(world, program)
    assert len(set(found)) == 1
    assert "\n  data_group: of 1 ranks on rank 0, not given on rank 1" in found[0]


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("rank_without", range(4))
def test_a_data_group_that_one_of_all_ranks_leaves_out_is_refused_on_every_rank(subject, world, rank_without):
    """Regression test: its partner in the other pipeline waited for it."""

    def program(rank):
        groups = side_by_side(rank)
        if rank == rank_without:
            del groups["data_group"]
        subject(tanh_net(), MSE, n_microbatches=2, **groups)

    found = errors(world, program, 4)
    assert len(set(found)) == 1
    place = rank_without % 2
    given = [f"{'not given' if rank == place else 'of 2 ranks'} on rank {rank}" for rank in range(2)]
    assert f"\n  data_group: {given[0]}, {given[1]}" in found[0]


@pytest.mark.beyond_contract("error messages")
def test_a_data_group_that_a_rank_is_not_in_is_refused_on_every_rank(subject, world):
    """Regression test: only that rank raised."""

    def program(rank):
        groups = side_by_side(rank)
        others = dist.new_group([0, 2])
        subject(tanh_net(), MSE, n_microbatches=2, **{**groups, "data_group": others})

    found = errors(world, program, 4)
    assert len(set(found)) == 1
    assert found[0].startswith("ValueError: Pipeline got a data_group that rank 1 is not in; give each rank the group")


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("crossed", [[[0, 5], [1, 4], [2, 3]], [[0, 3], [1, 5], [2, 4]]], ids=["all", "two"])
def test_data_groups_that_cross_pipelines_are_refused_on_every_rank(subject, world, crossed):
    """Otherwise gradients of one layer would be averaged with those of another."""

    def program(rank):
        pipelines = [dist.new_group(ranks) for ranks in ([0, 1, 2], [3, 4, 5])]
        stages = [dist.new_group(ranks) for ranks in crossed]
        mine = next(group for group, ranks in zip(stages, crossed, strict=True) if rank in ranks)
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
        subject(model, MSE, n_microbatches=2, group=pipelines[rank // 3], data_group=mine)

    found = errors(world, program, 6)
    assert len(set(found)) == 1
    first = next(ranks for place, ranks in enumerate(crossed) if ranks != [place, place + 3])
    right = [first[0], first[0] + 3]
    assert found[0].startswith(
        f"ValueError: Pipeline got the data_group of ranks {first}, where ranks {right} have the same stages; give each"
    )


@pytest.mark.beyond_contract("error messages")
def test_a_data_group_inside_of_a_pipeline_is_refused_on_every_rank(subject, world):
    def program(rank):
        subject(tanh_net(), MSE, n_microbatches=2, data_group=dist.group.WORLD)

    refused = "Pipeline got ranks [0, 1] in group and in data_group; a data_group has one rank of each pipeline"
    assert errors(world, program) == [f"ValueError: {refused}"] * 2


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "pipedream"])
@pytest.mark.parametrize("other", [0, 1, 2])
def test_another_model_on_one_rank_is_refused_under_each_schedule(subject, world, schedule, other):
    def program(rank):
        model = tanh_net(6, width=5) if rank == other else tanh_net(6)
        keywords = {"optimizer": SGD} if schedule == "pipedream" else {}
        subject(model, MSE, schedule=schedule, n_microbatches=3, **keywords).step(*samples(6))

    found = errors(world, program, 3)
    assert len(set(found)) == 1
    assert found[0].startswith(f"ValueError: Pipeline was made otherwise on rank {other or 1} of its group than on")
    shapes = ("(5, 5)", "(3, 3)") if other == 0 else ("(3, 3)", "(5, 5)")
    assert f"\n  parameter '0.weight': float32 {shapes[0]} on rank 0, float32 {shapes[1]} on rank" in found[0]


def test_what_may_differ_does(subject, world):
    """Values, the stages' learning rates and frozen parameters, and the spelling of the schedule may differ."""

    def program(rank):
        torch.manual_seed(rank)
        model = tanh_net()
        if rank:
            model[6].requires_grad_(False)
        schedule = one_f_one_b(2, 2) if rank else "1f1b"
        subject(model, MSE, schedule=schedule, n_microbatches=2, split=[4] if rank else "layers").step(*samples(4))
        rates = partial(torch.optim.SGD, lr=0.1 * (1 + rank))
        subject(tanh_net(), MSE, schedule="pipedream", n_microbatches=2, optimizer=rates).step(*samples(4))

    assert errors(world, program) == ["nothing"] * 2
