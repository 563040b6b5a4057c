"""Changes of a module after DistributedDataParallel wrapped it are detected and named on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from .models import TINY, alike, ddp, fitting, gradients, mean_gradients, require_close, samples, squared


def replace(model):
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def remove(model):
    bias = model[0].bias
    del model[0].bias
    model[0].forward = lambda x: nn.functional.linear(x, model[0].weight, bias)


def move(model):
    weight = model[0].weight
    del model[0].weight
    model[2].register_parameter("taken", weight)
    model[0].forward = lambda x: nn.functional.linear(x, weight, model[0].bias)


def tie(name, other):
    """Return a change that gives parameter ``name`` the tensor of ``other``; either may come first in the model."""

    def change(model):
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, model.get_parameter(other))

    return change


def square():
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))


ELSEWHERE = {
    "removed": (remove, "'0.bias' was removed after wrapping"),
    "moved": (move, "'0.weight' was moved to '2.taken' after wrapping"),
    "the second tied": (tie("2.weight", "0.weight"), "'2.weight' was tied to '0.weight' after wrapping"),
    "the first tied": (tie("0.weight", "2.weight"), "'0.weight' was tied to '2.weight' after wrapping"),
}


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize("where", [[0, 1], [1]], ids=["everywhere", "on rank 1"])
@pytest.mark.parametrize("change", ELSEWHERE)
def test_a_parameter_that_is_elsewhere_after_wrapping_is_named_on_every_rank(subject, rank, change, where):
    model = alike(square)
    wrapped = subject(model)
    squared(wrapped, rank).backward()
    model.zero_grad()
    change_it, named = ELSEWHERE[change]
    if rank in where:
        change_it(model)
    ranks = "every rank" if len(where) == 2 else "rank 1"
    with pytest.raises(RuntimeError, match=f"^DistributedDataParallel: on {ranks}, parameter {named}; wrap the module"):
        squared(wrapped, rank).backward()


@ddp
@pytest.mark.world_size(2)
def test_weights_that_were_tied_before_wrapping_are_no_change(subject, rank):
    def tied():
        model = square()
        tie("2.weight", "0.weight")(model)
        return model

    model = alike(tied)
    wrapped = subject(model)
    for _ in range(2):
        model.zero_grad()
        squared(wrapped, rank).backward()
        require_close(gradients(model), mean_gradients(2, squared, tied))


CHANGES = {
    "added": (lambda m: m.register_parameter("extra", nn.Parameter(torch.zeros(1))), "'extra' was added"),
    "a layer added": (lambda m: m.append(nn.Linear(1, 1).double()), "'3.weight' was added"),
    "replaced": (replace, "'0.weight' was replaced by another one"),
    "frozen": (lambda m: m[2].requires_grad_(False), "'2.weight' was frozen"),
    "unfrozen": (lambda m: m[2].bias.requires_grad_(True), "'2.bias' was unfrozen"),
    "cast": (lambda m: setattr(m[0].bias, "data", m[0].bias.data.float()), "'0.bias' was cast from torch.float64"),
    "resized": (lambda m: setattr(m[2].bias, "data", torch.zeros(1, 1).double()), r"'2.bias' was resized from \(1,\)"),
}


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("where", "find_unused"), [([0, 1], False), ([1], True)], ids=["everywhere", "on rank 1, unused ones found"]
)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_wrapping_is_named_on_every_rank(subject, rank, change, where, find_unused):
    model = alike()
    model[2].bias.requires_grad_(change != "unfrozen")
    wrapped = subject(model, find_unused_parameters=find_unused, **fitting(subject, TINY))
    squared(wrapped, rank).backward()
    model.zero_grad()
    change_it, named = CHANGES[change]
    if rank in where:
        change_it(model)
    if change == "cast":  # a model of two dtypes cannot run, but its output does not matter here
        model[0].forward = lambda x: nn.functional.linear(x, model[0].weight, model[0].bias.double())
    ranks = "every rank" if len(where) == 2 else "rank 1"
    with pytest.raises(RuntimeError, match=f"^DistributedDataParallel: on {ranks}, parameter {named}.*; wrap"):
        squared(wrapped, rank).backward()


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize("where", [[0, 1], [1]], ids=["everywhere", "on rank 1"])
def test_a_model_whose_parameters_are_all_replaced_is_seen(subject, rank, where):
    wrapped = subject(alike())
    if rank in where:
        wrapped.load_state_dict(wrapped.state_dict(), assign=True)
    ranks = "every rank" if len(where) == 2 else "rank 1"
    with pytest.raises(RuntimeError, match=f": on {ranks}, parameter '0.weight' was replaced by another one after"):
        squared(wrapped, rank).backward()


@ddp
@pytest.mark.world_size(2)
def test_a_call_with_other_parameters_is_no_change(subject, rank):
    model = alike()
    squared(model, rank).backward()
    own = gradients(model)
    model.zero_grad()
    wrapped = subject(model)
    others = {n: p.detach().clone().requires_grad_() for n, p in wrapped.named_parameters()}
    torch.func.functional_call(wrapped, others, (samples(rank),)).square().mean().backward()
    require_close({name.removeprefix("module."): p.grad for name, p in others.items()}, own)
    squared(wrapped, rank).backward()
    require_close(gradients(model), mean_gradients(2, squared))


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
def test_casting_the_whole_model_after_wrapping_is_seen(subject, rank):
    wrapped = subject(alike())
    wrapped.float()
    with pytest.raises(RuntimeError, match=r"'0.weight' was cast from torch.float64 to torch.float32 after wrapping"):
        wrapped(samples(rank).float()).sum().backward()


class Normed(nn.Sequential):
    """A model with one buffer that forward needs, and one that it does not need."""

    def __init__(self):
        super().__init__(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.register_buffer("mark", torch.arange(2.0))


def set_buffer(model, name, value):
    model.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = value


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize("where", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("name", ["1.running_mean", "mark"])
def test_a_buffer_of_another_shape_is_named_on_every_rank(subject, rank, where, name):
    model = alike(Normed)
    wrapped = subject(model)
    if rank in where:
        set_buffer(model, name, torch.zeros(3).double())
    ranks = "every rank" if len(where) == 2 else f"rank {where[0]}"
    what = rf"buffer '{name}' was torch.float64 \(2,\) on cpu, it is torch.float64 \(3,\) on cpu now; wrap the module"
    with pytest.raises(RuntimeError, match=f"^DistributedDataParallel: on {ranks}, {what}"):
        squared(wrapped, rank).backward()


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
def test_a_buffer_that_one_rank_has_changed_keeps_no_other_from_evaluating(subject, rank):
    model = alike(Normed)
    wrapped = subject(model)
    if rank == 1:
        model.register_buffer("extra", torch.zeros(1))
    with torch.no_grad():
        if rank == 1:
            with pytest.raises(RuntimeError, match=r"'extra' was not there, it is torch.float32 \(1,\) on cpu"):
                wrapped(samples(0))
        else:
            wrapped(samples(0))


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
def test_a_change_by_which_forward_fails_on_one_rank_is_named_on_every_rank(subject, rank):
    model = alike()
    wrapped = subject(model)
    if rank == 1:
        model[0].float()
    with pytest.raises(RuntimeError, match=r": on rank 1, parameter '0.weight' was cast from torch.float64 to"):
        squared(wrapped, rank).backward()


@pytest.mark.beyond_contract("buffers that a rank registers anew")
@ddp
@pytest.mark.world_size(2)
def test_buffers_may_be_registered_anew_in_another_order(subject, rank):
    model = alike(Normed)
    model.register_buffer("other", torch.full((2,), 7.0).double())
    wrapped = subject(model)
    if rank == 1:
        mark = model.mark
        del model.mark
        model.register_buffer("mark", mark)
    wrapped(samples(rank))
    assert model.mark.tolist() == [0, 1]
    assert model.other.tolist() == [7, 7]


@ddp
@pytest.mark.world_size(2)
def test_new_values_are_no_change(subject, rank):
    model = alike()
    wrapped = subject(model)
    for p in model.parameters():
        p.data = p.data.clone()
    squared(wrapped, rank).backward()
    require_close(gradients(model), mean_gradients(2, squared))
