"""Local SGD and DiLoCo are saved and restored, and every rank refuses states that do not fit."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from .training import ADAM, MOMENTUM, OUTERS, PLAIN, backward, made, sgd

# saved and restored


def outer_of_paper(subject):
    return {"outer": sgd(OUTERS[1])} if subject.__name__ == "DiLoCo" else {"momentum": "average"}


BOTH = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.verifies(name), id=name) for name in ("DiLoCo", "LocalSGD")]
)


@BOTH
@pytest.mark.world_size(2)
@pytest.mark.parametrize("saved_at", [3, 4])
def test_training_goes_on_from_a_saved_state_as_if_it_had_not_stopped(name, subject, saved_at, tmp_path):
    def train(first, last, resume):
        model = made()
        optimizer = MOMENTUM(model.parameters())
        trainer = subject(optimizer, model, sync_every=3, **outer_of_paper(subject))
        everything = {"model": model, "optimizer": optimizer, "trainer": trainer}
        if resume:
            saved = torch.load(tmp_path / "saved", weights_only=True)
            for part, value in everything.items():
                value.load_state_dict(saved[part])
        for step in range(first, last):
            backward(model, step)
            trainer.step()
        torch.save({part: value.state_dict() for part, value in everything.items()}, tmp_path / "saved")
        return nn.utils.parameters_to_vector(model.parameters())

    expected = train(0, 8, resume=False)
    train(0, saved_at, resume=False)
    assert torch.equal(train(saved_at, 8, resume=True), expected)


# refused states


@pytest.mark.beyond_contract("error messages")
@BOTH
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"sync_every": 0}, "needs sync_every of at least 1, got sync_every=0"),
        ({"sync_every": 1, "momentum": "mean"}, "knows momentum 'average', 'keep' and 'reset', got 'mean'"),
        ({"sync_every": 1, "buffers": "drop"}, "knows buffers 'average', 'broadcast' and 'keep', got 'drop'"),
    ],
    ids=["sync_every", "momentum", "buffers"],
)
def test_wrong_arguments_are_refused(name, subject, keywords, message):
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=f"{name} {message}$"):
        subject(PLAIN(model.parameters()), model, **keywords)


@pytest.mark.beyond_contract("error messages")
@BOTH
@pytest.mark.world_size(3)
def test_what_is_wrong_on_one_rank_is_refused_on_all(name, subject, rank):
    model = nn.Linear(1, 1)
    optimizer = PLAIN(model.parameters())
    with pytest.raises(ValueError, match=rf"{name} needs sync_every of at least 1, got sync_every=-1 \(on rank 1\)"):
        subject(optimizer, model, sync_every=-1 if rank == 1 else 2)
    with pytest.raises(ValueError, match=f"{name} needs the same sync_every on every rank, got 2 on rank 0 and 3 on r"):
        subject(optimizer, model, sync_every=3 if rank == 2 else 2)
    with pytest.raises(ValueError, match="the same kind of optimizer on every rank, got SGD on rank 0 and Adam on ran"):
        subject(ADAM(model.parameters()) if rank == 2 else optimizer, model, sync_every=2)
    for options in ({"lr": torch.tensor(0.5)}, {"lr": 0.5, "foreach": False}, {"lr": 0.5}):
        unlike = torch.optim.SGD(model.parameters(), **(options if rank == 1 else {"lr": 0.1}))
        with pytest.raises(ValueError, match=f"{name} needs the same lr of the optimizer's group 0 on .* got 0.1 .*5"):
            subject(unlike, model, sync_every=2)
    unlike = torch.optim.Adam(model.parameters(), betas=(0.9, 0.99 if rank else 0.9))
    with pytest.raises(ValueError, match=f"{name} needs the same betas of the optimizer's group 0 on every rank, got"):
        subject(unlike, model, sync_every=2)
    unlike = torch.optim.SGD([{"params": [p]} for p in model.parameters()] if rank else model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"needs the same sizes of the optimizer's groups on every rank, got .2. on"):
        subject(unlike, model, sync_every=2)
    subject(torch.optim.SGD(model.parameters(), lr=0.1, foreach=rank == 1), model, sync_every=2)
    other = nn.Linear(2, 1) if rank == 2 else model
    with pytest.raises(ValueError, match=r"the same model on every rank, got .*'weight': .*on rank 2"):
        subject(PLAIN(other.parameters()), other, sync_every=2)
    masked = nn.Linear(1, 1)
    masked.register_buffer("mask", torch.ones(1).expand(2) if rank == 1 else torch.ones(2))
    with pytest.raises(ValueError, match=rf"{name} got 'mask', an expanded tensor, .* by its .clone\(\) \(on rank 1\)"):
        subject(PLAIN(masked.parameters()), masked, sync_every=2)
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    with pytest.raises(ValueError, match="needs every rank of the group in one node_group"):
        subject(optimizer, model, sync_every=2, node_group=None if rank == 2 else groups[0])


@pytest.mark.beyond_contract("error messages")
@BOTH
@pytest.mark.world_size(2)
def test_an_optimizer_of_another_model_is_refused(name, subject):
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=f"{name} got an optimizer of another model: its parameter 0 is not one of"):
        subject(PLAIN(copy.deepcopy(model).parameters()), model, sync_every=2)
    with pytest.raises(TypeError, match=f"{name} takes a torch.optim.Optimizer first, got Linear"):
        subject(model, model, sync_every=2)
    with pytest.raises(ValueError, match=f"{name} got an empty model"):
        subject(PLAIN(model.parameters()), nn.ReLU(), sync_every=2)


@pytest.mark.beyond_contract("error messages")
@BOTH
@pytest.mark.world_size(3)
def test_a_model_that_one_rank_changed_after_wrapping_is_refused_on_all(name, subject, rank):
    model = nn.Linear(1, 1)
    trainer = subject(PLAIN(model.parameters()), model, sync_every=2)
    if rank == 1:
        model.weight = nn.Parameter(torch.zeros(2, 1))
    trainer.step()
    with pytest.raises(ValueError, match=f"{name} found other parameters than those .* on 1 of 3 ranks"):
        trainer.step()


@pytest.mark.beyond_contract("error messages")
@BOTH
@pytest.mark.world_size(2)
def test_a_state_of_something_else_is_refused(name, subject, rank):
    model = nn.Linear(1, 1)
    trainer = subject(PLAIN(model.parameters()), model, sync_every=2)
    saved = trainer.state_dict()
    caller = f"{name}.load_state_dict"
    with pytest.raises(ValueError, match=f"{caller} needs a state with sync_every=2, got 4; make it as the one"):
        trainer.load_state_dict(saved | {"sync_every": 4})
    with pytest.raises(ValueError, match=f"{caller} needs a state with format=1, got 2"):
        trainer.load_state_dict(saved | {"format": 2})
    with pytest.raises(ValueError, match=f"{caller} needs a state with format=1, got nothing.*on rank 1"):
        trainer.load_state_dict({} if rank else saved)
    for name, value in (("taken", "x"), ("taken", 1.0), ("since_round", -1)):
        with pytest.raises(ValueError, match=rf"{caller} needs a state .* {name}, got {value!r} \(on rank 1"):
            trainer.load_state_dict(saved | {name: value if rank else 0})
    with pytest.raises(ValueError, match=rf"{caller} needs a state that state_dict\(\) gave.*'taken' \(on rank 1"):
        trainer.load_state_dict({key: value for key, value in saved.items() if not rank or key != "taken"})
    assert trainer.state_dict()["taken"] == 0


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("LocalSGD")
@pytest.mark.world_size(2)
def test_states_of_ranks_that_would_not_meet_are_refused(subject, rank):
    model = nn.Linear(1, 1)
    trainer = subject(PLAIN(model.parameters()), model, sync_every=2, synchronous_steps=3)
    with pytest.raises(ValueError, match="needs the same synchronous steps taken on every rank, got 3 on rank 0 and 2"):
        trainer.load_state_dict(trainer.state_dict() | {"taken": 5 - 3 * rank})
    trainer.load_state_dict(trainer.state_dict() | {"taken": 5 - rank})
    assert trainer.state_dict()["taken"] == 5 - rank


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("DiLoCo")
@pytest.mark.world_size(2)
def test_diloco_refuses(subject, rank):
    model = nn.Linear(1, 1)
    optimizer = PLAIN(model.parameters())
    with pytest.raises(ValueError, match=r"same lr of the outer optimizer's group 0 .* got 0\.5 .* and 1\.0 on"):
        subject(optimizer, model, sync_every=2, outer=sgd((1.0 if rank else 0.5, 0.0, False)))

    def outer(parameters, rate=0.2, order=1):
        first, second = parameters[::order]
        return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": [second], "lr": rate}])

    with pytest.raises(ValueError, match=r"same lr of the outer optimizer's group 1 .* got 0\.2 .* and 0\.3 on"):
        subject(optimizer, model, sync_every=2, outer=partial(outer, rate=0.3 if rank else 0.2))
    with pytest.raises(ValueError, match=r"same order of the outer optimizer's parameters .* got .'weight', 'bias'."):
        subject(optimizer, model, sync_every=2, outer=partial(outer, order=-1 if rank else 1))
    subject(optimizer, model, sync_every=2, outer=outer)
    with pytest.raises(TypeError, match="DiLoCo takes outer as a maker of an optimizer, it made str"):
        subject(optimizer, model, sync_every=2, outer=str)
    diloco = subject(optimizer, model, sync_every=2)
    saved = diloco.state_dict()
    saved["reference"] = {"weight": torch.zeros(3, 1)}
    with pytest.raises(ValueError, match="got the reference of another model: 'bias' has shape None there and"):
        diloco.load_state_dict(saved)
    saved = diloco.state_dict()
    halves = copy.deepcopy(saved) | {"taken": 7}
    halves["outer"]["param_groups"][0]["params"] = [0]
    with pytest.raises(ValueError, match=r"an outer optimizer with groups of \[1\] parameters, here they have \[2\]"):
        diloco.load_state_dict(halves if rank else saved)
    adam = subject(optimizer, model, sync_every=2, outer=ADAM)
    with pytest.raises(ValueError, match="got an outer optimizer of another kind: group 0 lacks 'amsgrad'"):
        adam.load_state_dict(saved | {"taken": 7})
    for part in ("reference", "outer"):
        with pytest.raises(ValueError, match=rf"needs a state that state_dict\(\) gave.*'{part}' \(on rank 0\)"):
            diloco.load_state_dict({key: value for key, value in saved.items() if rank or key != part} | {"taken": 7})
    with pytest.raises(ValueError, match=r"needs a state that state_dict\(\) gave, got one without 'state'"):
        diloco.load_state_dict(saved | {"taken": 7, "outer": {"param_groups": saved["outer"]["param_groups"]}})
    assert diloco.state_dict()["taken"] == adam.state_dict()["taken"] == 0
