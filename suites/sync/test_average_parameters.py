"""Averages of models are means over ranks, with buffers by policy, or an error on every rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pdlcheck.checks import check_average_parameters
from pdlcheck.checks.rank_results import possible_order
from pdlcheck.checks.strategies import group_ranks, module_makers

from .models import UNFIT, Everything, Usual, few, tanh_net


def without_booleans(make):
    """Return a function that makes the model without its mask: booleans have no mean."""

    def made():
        model = make()
        model.mask = None
        return model

    return made


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("average_parameters")
@pytest.mark.world_size(3)
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("drop", r"knows buffers 'average', 'broadcast' and 'keep', got 'drop' \(on rank 1\)$"),
        ("keep", "needs the same buffers on every rank, got average on rank 0 and keep on rank 1$"),
    ],
)
def test_what_average_parameters_refuses_on_one_rank_is_refused_on_all(subject, rank, other, message):
    model = tanh_net()
    model.register_buffer("count", torch.tensor(3))  # takes an extra message on ranks that average it
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=f"^average_parameters {message}"):
        subject(model, buffers=other if rank == 1 else "average")
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    subject(model)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("average_parameters")
@pytest.mark.world_size(3)
@pytest.mark.parametrize("case", UNFIT)
@pytest.mark.parametrize("buffers", ["average", "broadcast"])
def test_a_model_of_one_rank_that_cannot_be_sent_is_not_averaged_on_any(subject, rank, case, buffers):
    make, message = UNFIT[case]
    mesh = init_device_mesh("cpu", (3,))
    model = make(mesh) if rank == 1 else nn.Linear(2, 2)
    model.register_buffer("count", torch.tensor(3))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=rf"^average_parameters {message} \(on rank 1\)$"):
        subject(model, buffers=buffers)
    if rank != 1:
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.verifies("average_parameters")
@given(make=module_makers(), world_size=st.integers(1, 4))
def test_average_parameters_is_the_mean_over_ranks(subject, world, make, world_size):
    check_average_parameters(subject, make, world, world_size=world_size)


@pytest.mark.verifies("average_parameters")
@few
@given(data=st.data())
def test_average_parameters_divides_by_the_size_of_the_group(subject, world, data):
    ranks = data.draw(group_ranks(world_size=data.draw(st.integers(1, 3))))
    check_average_parameters(subject, without_booleans(Usual), world, ranks=ranks)


@pytest.mark.beyond_contract("dtypes that torch's collectives refuse on gloo")
@pytest.mark.verifies("average_parameters")
def test_average_parameters_averages_every_dtype(subject, world):
    check_average_parameters(subject, without_booleans(Everything), world, ranks=possible_order([3, 1, 2]))


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("average_parameters")
@pytest.mark.world_size(2)
def test_a_mean_of_integers_is_exact_or_an_error_on_every_rank(subject, rank):
    model = nn.BatchNorm1d(1)
    model.num_batches_tracked.fill_(rank + 2)
    model.weight.data.fill_(rank)
    with pytest.raises(
        ValueError, match=r"cannot average 'num_batches_tracked', torch.int64: the sum over 2 ranks is 5"
    ):
        subject(model)
    assert model.weight.item() == rank  # unchanged
    model.num_batches_tracked.fill_(2 * rank + 3)
    subject(model)
    assert model.num_batches_tracked.item() == 4


@pytest.mark.beyond_contract("integers whose sum overflows")
@pytest.mark.verifies("average_parameters")
@pytest.mark.world_size(3)
@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.int64, [2**62, 2**62, 2**62]),
        (torch.int64, [-(2**63), -(2**63), -(2**63)]),
        (torch.int64, [2**63 - 1, -(2**63), 1]),
        (torch.int64, [2**63 - 1, 2**63 - 2, 2**63 - 3]),
        (torch.int8, [127, 127, 124]),
        (torch.uint64, [2**64 - 1, 2**64 - 1, 2**63 - 2]),
        (torch.uint64, [0, 2, 2**64 - 3]),
    ],
)
def test_a_mean_of_large_integers_does_not_overflow(subject, rank, dtype, values):
    model = nn.BatchNorm1d(1)
    model.num_batches_tracked = torch.tensor(values[rank], dtype=dtype)
    subject(model)
    assert model.num_batches_tracked.item() == sum(values) // 3


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("average_parameters")
@pytest.mark.world_size(3)
def test_a_mean_of_large_integers_that_is_no_integer_is_refused(subject, rank):
    model = nn.BatchNorm1d(1)
    model.num_batches_tracked = torch.tensor(2**63 - 1 - (rank == 0))
    with pytest.raises(ValueError, match=f"the sum over 3 ranks is {3 * (2**63 - 1) - 1}, its mean is not an integer"):
        subject(model)


@pytest.mark.if_subject_takes("buffers")
@pytest.mark.verifies("average_parameters")
@pytest.mark.world_size(2)
@pytest.mark.parametrize(("buffers", "expected"), [("broadcast", [2, 2]), ("keep", [2, 3])])
def test_buffers_are_broadcast_or_kept_on_demand(subject, rank, buffers, expected):
    model = nn.BatchNorm1d(1)
    model.num_batches_tracked.fill_(rank + 2)
    model.weight.data.fill_(rank)
    subject(model, buffers=buffers)
    assert model.num_batches_tracked.item() == expected[rank]
    assert model.weight.item() == 0.5


@pytest.mark.verifies("average_parameters")
def test_the_average_of_equal_models_is_the_model(subject, world):
    def distance():
        torch.manual_seed(7)
        model = tanh_net()
        before = [p.detach().clone() for p in model.parameters()]
        subject(model)
        return max(
            float(((p.detach() - b).abs() / b.abs()).max()) for p, b in zip(model.parameters(), before, strict=True)
        )

    for world_size in (1, 2, 3, 5):
        # adding world_size equal terms and dividing rounds at most world_size times
        assert max(world.run(distance, world_size=world_size)) <= world_size * torch.finfo(torch.float32).eps


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("average_parameters")
@pytest.mark.world_size(2)
def test_average_parameters_refuses_what_it_does_not_know(subject):
    with pytest.raises(ValueError, match="knows buffers 'average', 'broadcast' and 'keep', got 'drop'"):
        subject(tanh_net(), buffers="drop")
    with pytest.raises(ValueError, match="average_parameters got an empty model: ReLU has no parameter"):
        subject(nn.ReLU())
    with pytest.raises(TypeError, match=r"average_parameters takes a torch.nn.Module, got list"):
        subject([])
