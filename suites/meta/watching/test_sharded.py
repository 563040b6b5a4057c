"""Models that ranks divide: a tensor is compared on the ranks that hold copies of it, and on no others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import RanksDiffer
from pdlcheck.worlds import get_world

from .trainings import fsdp2, hsdp, linears, local, on_rank, tensor_and_data_parallel, tensor_parallel

SIM = get_world("sim")
WRAPS = {fsdp2: 2, hsdp: 4, tensor_parallel: 2, tensor_and_data_parallel: 4}
SAME_SAMPLES = {tensor_parallel: [[0, 1]], tensor_and_data_parallel: [[0, 1], [2, 3]]}


def run(wrap, fault=None, **options):
    sets = SAME_SAMPLES.get(wrap, [])
    options = {"at": 4, "wrap": wrap, "make": linears, "same_samples": sets, "same_data": bool(sets), **options}
    return SIM.run(on_rank, fault, world_size=WRAPS[wrap], **options)


def changed(name, rank):
    def fault(model, optimizer):
        if dist.get_rank() == rank:
            with torch.no_grad():
                local(model.get_parameter(name)).add_(0.5)

    return fault


def changed_state(name, rank):
    def fault(model, optimizer):
        if dist.get_rank() == rank:
            local(optimizer.state[model.get_parameter(name)]["exp_avg"]).add_(0.5)

    return fault


def scaled_gradient(name, rank):
    def fault(model, optimizer):
        if dist.get_rank() == rank:
            with torch.no_grad():
                local(model.get_parameter(name).grad).mul_(2)

    return fault


@pytest.mark.parametrize("wrap", WRAPS, ids=lambda wrap: wrap.__name__)
def test_shards_give_no_alarm(wrap):
    assert run(wrap) == [None] * WRAPS[wrap]


@pytest.mark.parametrize(
    ("wrap", "fault", "message"),
    [
        (
            hsdp,
            changed("0.weight", 1),
            "rank 3 has another parameter '0.weight' than rank 1(.|\n)*memory error",
        ),
        (
            hsdp,
            scaled_gradient("2.weight", 3),
            "rank 3 has another gradient of '2.weight' than rank 1(.|\n)*if these ranks",
        ),
        pytest.param(
            hsdp,
            changed_state("2.weight", 3),
            "rank 3 has another parameter '2.weight' than rank 1",
            marks=pytest.mark.slow,
        ),
        (tensor_parallel, changed("2.bias", 1), "rank 1 has another parameter '2.bias' than rank 0"),
        (tensor_parallel, scaled_gradient("2.bias", 1), "rank 1 has another gradient of '2.bias' than rank 0"),
        pytest.param(
            tensor_and_data_parallel,
            changed("2.bias", 3),
            "rank 3 has another parameter '2.bias' than rank 2",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_copies_that_differ_are_reported(wrap, fault, message):
    with pytest.raises(RanksDiffer, match=rf"after step 4: {message}"):
        run(wrap, fault)


@pytest.mark.parametrize(
    ("wrap", "name"), [(fsdp2, "0.weight"), (tensor_parallel, "0.weight"), (tensor_and_data_parallel, "2.weight")]
)
def test_a_shard_that_one_rank_alone_holds_is_not_compared(wrap, name):
    assert run(wrap, changed(name, 1), at=5) == [None] * WRAPS[wrap]


def test_settings_of_shards_are_compared():
    def other_lr(model, optimizer):
        optimizer.param_groups[0]["lr"] += 0.1 * dist.get_rank()

    with pytest.raises(RanksDiffer, match=r"after step 4: rank 1 has 0.2 as 'lr' of group 0, rank 0 has 0.1"):
        run(fsdp2, other_lr)
