"""Replicas start with equal weights: every rank gets the model of one rank, or every rank gets the same error."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pdlcheck.checks import check_broadcast_parameters, check_same_start
from pdlcheck.checks.rank_results import possible_order
from pdlcheck.checks.strategies import MakeLayers, group_ranks, module_makers

from .models import Everything, Usual, few, on_meta, sharded, tanh_net


@pytest.mark.verifies("broadcast_parameters")
@given(make=module_makers(), data=st.data())
def test_broadcast_parameters_gives_every_rank_the_model_of_src(subject, world, make, data):
    world_size = data.draw(st.integers(1, 4))
    src = data.draw(st.integers(0, world_size - 1))
    check_broadcast_parameters(subject, make, world, world_size=world_size, src=src)


@pytest.mark.verifies("broadcast_parameters")
@few
@given(data=st.data())
def test_broadcast_parameters_works_in_any_group(subject, world, data):
    world_size = data.draw(st.integers(1, 3))
    ranks, src = data.draw(group_ranks(world_size=world_size)), data.draw(st.integers(0, world_size - 1))
    check_broadcast_parameters(subject, Usual, world, ranks=ranks, src=src)


@pytest.mark.verifies("broadcast_parameters")
def test_broadcast_parameters_sends_every_kind_of_state(subject, world):
    check_broadcast_parameters(subject, Usual, world, world_size=3, src=1)


@pytest.mark.beyond_contract("dtypes that torch's collectives refuse on gloo")
@pytest.mark.verifies("broadcast_parameters")
@pytest.mark.parametrize("ranks", [None, possible_order([3, 1, 2])], ids=["everybody", "a group"])
def test_broadcast_parameters_sends_every_dtype(subject, world, ranks):
    check_broadcast_parameters(subject, Everything, world, world_size=3, ranks=ranks, src=1)


@pytest.mark.if_subject_takes("by")
@pytest.mark.verifies("broadcast_parameters")
@pytest.mark.parametrize("ranks", [None, possible_order([3, 1, 2])], ids=["everybody", "a group"])
def test_broadcast_parameters_by_messages_sends_every_kind_of_state(subject, world, ranks):
    check_broadcast_parameters(partial(subject, by="messages"), Everything, world, world_size=3, ranks=ranks, src=1)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("broadcast_parameters")
@pytest.mark.world_size(2)
def test_broadcast_parameters_refuses_another_way_to_send(subject):
    with pytest.raises(ValueError, match="knows by='broadcast' and by='messages', got 'pigeon'"):
        subject(nn.Linear(1, 1), by="pigeon")


@pytest.mark.verifies("broadcast_parameters")
def test_broadcast_parameters_sends_a_model_that_only_has_buffers(subject, world):
    check_broadcast_parameters(subject, lambda: nn.BatchNorm1d(2, affine=False), world, world_size=2)


@pytest.mark.verifies("broadcast_parameters")
def test_replicas_start_alike_after_broadcast_parameters(subject, world):
    def make():
        model = tanh_net()
        subject(model)
        return model

    check_same_start(make, world, world_size=4)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("broadcast_parameters")
@pytest.mark.world_size(2)
def test_broadcast_parameters_refuses_an_empty_model(subject):
    with pytest.raises(ValueError, match="broadcast_parameters got an empty model: ReLU has no parameter"):
        subject(nn.ReLU())


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("broadcast_parameters")
@pytest.mark.world_size(2)
def test_broadcast_parameters_refuses_a_lazy_model(subject):
    with pytest.raises(ValueError, match="'weight', which has no shape yet; run one forward pass first"):
        subject(nn.LazyLinear(2))


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("broadcast_parameters")
@pytest.mark.world_size(2)
def test_broadcast_parameters_refuses_expanded_tensors(subject):
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(1).expand(3))
    with pytest.raises(ValueError, match=r"got 'mask', an expanded tensor, whose elements share .*; replace it by its"):
        subject(model)
    model.mask = model.mask.clone()
    subject(model)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("broadcast_parameters")
@pytest.mark.world_size(2)
def test_broadcast_parameters_refuses_a_model_on_another_device(subject):
    with pytest.raises(ValueError, match="broadcast_parameters got 'weight' on device meta"):
        subject(nn.Linear(2, 2, device="meta"))


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("broadcast_parameters")
@pytest.mark.world_size(2)
def test_broadcast_parameters_refuses_a_src_outside_the_group(subject):
    with pytest.raises(ValueError, match=r"src=2, which is outside the group; src is a global rank, one of \[0, 1\]"):
        subject(nn.Linear(2, 2), src=2)


def expanded(mesh):
    model = nn.Linear(2, 2)
    model.bias = nn.Parameter(torch.zeros(1).expand(2), requires_grad=False)
    return model


def crossed(mesh):
    model = nn.Linear(2, 2)
    weight = model.weight
    del model.weight
    model.weight = weight  # now it comes after the bias
    return model


# rank 1's argument, and the error on all ranks
BROADCASTS = {
    "src": ({"src": 7}, r"got src=7, which is outside the group; src is a global rank, one of \[0, 1, 2\]"),
    "no int": ({"src": "0"}, "takes src as a global rank, an int, got str"),
    "by": ({"by": "pigeon"}, "knows by='broadcast' and by='messages', got 'pigeon'"),
    "no module": ({"module": [1]}, "takes a torch.nn.Module, got list"),
    "empty": ({"module": lambda mesh: nn.ReLU()}, "got an empty model: ReLU has no parameter and no buffer"),
    "lazy": ({"module": lambda mesh: nn.LazyLinear(2)}, "got 'weight', which has no shape yet; .*"),
    "sharded": ({"module": sharded}, "needs tensors that each rank holds whole, 'bias' is a DTensor; .*"),
    "expanded": ({"module": expanded}, "got 'bias', an expanded tensor, whose elements share memory; replace it .*"),
    "device": ({"module": on_meta}, "got 'weight' on device meta, the group's backend .*"),
}
OTHER_MODELS = {
    "other src": ({"src": 1}, "the same src on every rank, got 0 on rank 0 and 1 on rank 1"),
    "more": (
        {"module": lambda mesh: nn.Sequential(nn.Linear(2, 2))},
        r"the same model on every rank: tensor 0 is 'weight' torch.float32 \(2, 2\) on cpu on rank 0, '0.weight' .*",
    ),
    "fewer": (
        {"module": lambda mesh: nn.Linear(2, 2, bias=False)},
        r"the same model .*: tensor 1 is 'bias' torch.float32 \(2,\) on cpu on rank 0, nothing on rank 1; .*",
    ),
    "shape": (
        {"module": lambda mesh: nn.Linear(2, 3)},
        r"the same model .* is 'weight' .* \(2, 2\) on cpu on rank 0, 'weight' .* \(3, 2\) on cpu on rank 1; .*",
    ),
    "dtype": (
        {"module": lambda mesh: nn.Linear(2, 2).double()},
        "the same model on every rank: tensor 0 is 'weight' torch.float32 .*, 'weight' torch.float64 .* on rank 1; .*",
    ),
    "order": ({"module": crossed}, "the same model .* 'weight' .* on rank 0, 'bias' .* on rank 1; .*"),
}


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("broadcast_parameters")
@pytest.mark.world_size(3)
@pytest.mark.parametrize("by", ["broadcast", "messages"])
@pytest.mark.parametrize("case", [*BROADCASTS, *OTHER_MODELS])
def test_what_broadcast_parameters_refuses_on_one_rank_is_refused_on_all(subject, rank, case, by):
    if (case, by) == ("by", "messages"):
        pytest.skip("a way that nobody knows is taken for a broadcast")
    keywords, message = (BROADCASTS | OTHER_MODELS)[case]
    message = rf"{message} \(on rank 1\)" if case in BROADCASTS else f"needs {message}"
    model = nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (3,))
    given = {"module": model, "src": 0, "by": by} | (keywords if rank == 1 else {})
    if not isinstance(given["module"], nn.Module | list):
        given["module"] = given["module"](mesh)
    with pytest.raises((TypeError, ValueError), match=f"^broadcast_parameters {message}$"):
        subject(**given)
    with torch.no_grad():
        model.weight.fill_(rank)
    subject(model, src=2, by=by)  # no rank was left waiting
    assert model.weight.unique().item() == 2


@pytest.mark.beyond_contract("memory formats that differ between ranks")
@pytest.mark.verifies("broadcast_parameters")
@pytest.mark.world_size(2)
def test_broadcast_parameters_takes_what_ranks_may_have_differently(subject, rank):
    model = nn.Conv2d(2, 2, 2).requires_grad_(rank == 0)
    if rank:
        model.to(memory_format=torch.channels_last)
    subject(model)
    assert not model.weight.requires_grad or rank == 0
    everyone = [None, None]
    dist.all_gather_object(everyone, model.weight.tolist())
    assert everyone[0] == everyone[1]


@pytest.mark.verifies("broadcast_parameters")
def test_tied_weights_of_drawn_models_stay_tied(subject, world):
    check_broadcast_parameters(subject, MakeLayers((2, 2), batch_norm=True, tied=True), world, world_size=2)
