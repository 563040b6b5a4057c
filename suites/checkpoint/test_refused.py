"""A checkpoint that is damaged or does not fit is refused with the reason, and no object changes."""

from __future__ import annotations

import io
import os
import pickle
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR
from torch.optim.swa_utils import SWALR

from pdlcheck.checks import check_torn_files
from pdlcheck.errors import CheckpointError
from pdlcheck.primitives import load_checkpoint, save_checkpoint

from .test_forged import sealed_by_hand, step_in_words
from .training import ADAM, SGD, Holder, Shards, cut, damage, net, parts, training, weights, written


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("load_checkpoint")
def test_cut_files_and_flipped_bits_are_refused(subject, world):
    told = check_torn_files(training(load=subject), world, count=8)
    assert all("CheckpointError" in line for line in told)


def heads(path):
    return path.read_bytes().split(b"\n", 3)


def cut_in_the_first_lines(path):
    path.write_bytes(path.read_bytes()[:40])


def emptied(path):
    path.write_bytes(b"")


def longer(path):
    path.write_bytes(path.read_bytes() + b"??")


def other_format(path):
    path.write_bytes(path.read_bytes().replace(b"format 2\n", b"format 7\n", 1))


def much_later_format(path):
    path.write_bytes(path.read_bytes().replace(b"format 2\n", b"format 117\n", 1))


def other_program(path):
    torch.save({"model": {}}, path)


def number_of_bytes_with_a_blank(path):
    first, digest, _, body = heads(path)
    path.write_bytes(b"\n".join([first, digest, b"nbytes %20d" % len(body), body]))


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def hostile(path):
    buffer = io.BytesIO()
    torch.save({"model": Hostile()}, buffer)
    sealed_by_hand(path, buffer.getvalue())


def hostile_pickle(path):
    sealed_by_hand(path, pickle.dumps(Hostile()))


def fifo(path):
    path.unlink()
    os.mkfifo(path)


def in_a_folder(path):
    path.unlink()
    path.mkdir()


REFUSED = [
    (cut, r"was cut at byte 200: it should be \d+ bytes long"),
    (cut_in_the_first_lines, "was cut at byte 40, inside its first lines"),
    (emptied, "is empty"),
    (damage, "was changed after it was written: its XXH3-128 is"),
    (longer, "is 2 bytes longer than the"),
    (other_format, "was written in format 7, this version of pdlcheck reads format 2"),
    (much_later_format, "was written in format 117, this version"),
    (other_program, "is not a checkpoint: it does not start with 'pdlcheck checkpoint"),
    (number_of_bytes_with_a_blank, "has damaged first lines"),
    (step_in_words, "is intact, but not a checkpoint of save_checkpoint"),
    (hostile, "holds something that weights_only=True does not load"),
    (hostile_pickle, "holds something that weights_only=True does not load"),
    (Path.unlink, "does not exist"),
    (fifo, "is no regular file"),
    (in_a_folder, "is a folder: pass a file of it, such as latest_checkpoint gives"),
]


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("load_checkpoint")
@pytest.mark.parametrize(("spoil", "message"), REFUSED, ids=[spoil.__name__ for spoil, _ in REFUSED])
def test_a_file_is_refused_with_what_is_wrong_and_the_previous_is_offered(subject, world, tmp_path, spoil, message):
    def read():
        held = parts()
        before = weights(held)
        with pytest.raises(CheckpointError, match=message) as caught:
            subject(path, **held)
        assert weights(held) == before
        return str(caught.value), caught.value.previous

    previous = written(tmp_path, world)
    path = written(tmp_path, world, step_number=3)
    spoil(path)
    (text, offered), other = world.run(read, world_size=2)
    assert (text, offered) == other
    assert offered == str(previous)
    assert f"{previous} is intact: load that" in text
    assert not Path("executed").exists()


@pytest.mark.slow
@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("load_checkpoint")
@pytest.mark.parametrize(("spoil", "message"), REFUSED, ids=[spoil.__name__ for spoil, _ in REFUSED])
def test_a_file_that_one_rank_cannot_read_is_refused_by_all(subject, world, tmp_path, spoil, message):
    """Each rank has its own folder; all name the wrong file, and offer their own copy of the previous one."""

    def read(offered):
        own = tmp_path / f"node-{dist.get_rank()}"
        with pytest.raises(CheckpointError, match=message) as caught:
            subject(own / path.name, **parts())
        assert caught.value.path == str(own / path.name)
        assert caught.value.previous == (str(own / previous.name) if offered else None)
        return caught.value.rank, str(caught.value)

    for node in range(3):
        torch.manual_seed(0)
        previous = written(tmp_path / f"node-{node}", world, world_size=3, step_number=1)
        path = written(tmp_path / f"node-{node}", world, world_size=3)
    spoil(tmp_path / "node-1" / path.name)
    ((rank, text),) = {*world.run(read, True, world_size=3)}
    wrong = tmp_path / "node-1" / path.name
    assert rank == 1
    assert re.search(rf"(?s)^load_checkpoint: {wrong} {message}.* \(on rank 1 of 3\); nothing was loaded", text)
    assert text.endswith(f"{wrong.with_name(previous.name)} is intact: load that")
    (tmp_path / "node-2" / previous.name).unlink()
    ((rank, text),) = {*world.run(read, False, world_size=3)}
    assert rank == 1
    assert text.endswith("there is no earlier one")


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("load_checkpoint")
def test_a_sparse_tensor_that_was_unpickled_before_is_no_reason_to_refuse(subject, tmp_path):
    """Such tensors are checked by torch when it loads the next file, with a warning; here warnings are errors."""
    pickle.loads(pickle.dumps(torch.eye(2).to_sparse()))
    model = net()
    assert subject(save_checkpoint(tmp_path, model=model, step=3), model=model) == 3


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("load_checkpoint")
def test_different_files_of_one_name_are_refused(subject, world, tmp_path):
    def read():
        with pytest.raises(CheckpointError) as caught:
            subject(tmp_path / f"node-{dist.get_rank()}" / path.name, **parts())
        return str(caught.value)

    for node in range(2):
        path = written(tmp_path / f"node-{node}", world, optimizer=partial(SGD, lr=0.1 + node))
    (text,) = {*world.run(read, world_size=2)}
    assert f"{tmp_path / 'node-1' / path.name} is not the same file on rank 0 and rank 1; nothing was loaded" in text


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("latest_checkpoint")
def test_ranks_that_find_no_checkpoint_in_common_say_the_same(subject, world, tmp_path):
    def find():
        with pytest.raises(CheckpointError) as caught:
            subject(tmp_path / f"node-{dist.get_rank()}")
        return str(caught.value)

    path = written(tmp_path / "node-1", world)
    (text,) = {*world.run(find, world_size=2)}
    assert f"no checkpoint in {tmp_path / 'node-0'} is intact on every rank (rank 0: none; rank 1: {path.name})" in text


def wide():
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 1))


def double():
    return net().double()


def deep():
    return nn.Sequential(*net(), nn.Linear(1, 1))


def wrapped():
    model = nn.Module()
    model.module = net()
    return model


def compiled():
    model = nn.Module()
    model._orig_mod = net()  # the name that torch.compile uses
    return model


def two_groups(parameters):
    first, *rest = parameters
    return torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1, momentum=0.9)


def fewer(parameters):
    return SGD(list(parameters)[:-1])


def reordered(parameters):
    return SGD(list(parameters)[::-1])


MISFITS = [
    ({"make": wide}, r"another model: '0.weight' has shape \(5, 3\).*the checkpoint holds shape \(4, 3\)"),
    ({"make": double}, "another model: '0.weight' has shape .* and torch.float64, .* and torch.float32"),
    ({"make": deep}, "another model: it lacks '4.weight', '4.bias'"),
    ({"make": wrapped}, "this model lacks .* from a bare model: load into wrapper.module"),
    ({"make": compiled}, "one of the two is what torch.compile returned: save and load the model that it was given"),
    ({"optimizer": ADAM}, "optimizer is a AdamW, the checkpoint holds the state of a SGD"),
    ({"optimizer": two_groups}, "optimizer has 2 parameter groups, the checkpoint holds 1"),
    ({"optimizer": fewer}, "group 0 of optimizer has 5 parameters, that of the checkpoint 6"),
    (
        {"optimizer": reordered},
        "group 0 of optimizer has '3.bias' of shape .* as parameter 0, the checkpoint '0.weight'",
    ),
    ({"scheduler": "lambda"}, "scheduler is a LambdaLR, the checkpoint holds the state of a MultiStepLR"),
]


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("load_checkpoint")
@pytest.mark.parametrize(("other", "message"), MISFITS, ids=[message[:30] for _, message in MISFITS])
def test_what_does_not_fit_is_named_and_nothing_is_touched(subject, world, tmp_path, other, message):
    def read(ranks):
        torch.manual_seed(dist.get_rank())
        held = parts(**(other if dist.get_rank() in ranks else {}), alike=False)
        held_before, stream = weights(held), torch.get_rng_state()
        with pytest.raises(ValueError, match=message) as caught:
            subject(path, **held)
        assert weights(held) == held_before
        assert torch.equal(stream, torch.get_rng_state())
        assert held["sampler"].position == 0
        assert not held["optimizer"].state
        return str(caught.value)

    path = written(tmp_path, world)
    (text,) = {*world.run(read, [1], world_size=2)}
    assert text.endswith("(on rank 1 of 2)")  # one rank finds it, all raise
    (alike,) = {*world.run(read, [0, 1], world_size=2)}
    assert text == f"{alike} (on rank 1 of 2)"


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("load_checkpoint")
@pytest.mark.parametrize("after", [1, 3])
def test_a_world_that_it_cannot_be_re_sharded_to_is_named_on_every_rank(subject, world, tmp_path, after):
    def read():
        held = parts()
        before = weights(held)
        message = rf"2 ranks that differ in model .* cannot be re-sharded to {after}: resume on 2 ranks"
        with pytest.raises(ValueError, match=message) as caught:
            subject(path, **held)
        assert weights(held) == before
        return str(caught.value)

    path = written(tmp_path, world)
    assert len({*world.run(read, world_size=after)}) == 1


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("load_checkpoint")
def test_parameters_of_one_shape_in_another_order_are_another_optimizer(subject, tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    path = save_checkpoint(tmp_path, 1, model=model, optimizer=SGD(model.parameters()))
    swapped = SGD([*model[1].parameters(), *model[0].parameters()])
    with pytest.raises(ValueError, match=r"optimizer has '1.weight' .* as parameter 0, .* '0.weight' of shape"):
        subject(path, model=model, optimizer=swapped)


CYCLES = [partial(OneCycleLR, max_lr=0.2, total_steps=10), partial(CyclicLR, base_lr=0.1, max_lr=1.0)]


@pytest.mark.parametrize("scheduler", [*CYCLES, partial(SWALR, swa_lr=0.05)], ids=["one-cycle", "cycle", "swa"])
def test_an_optimizer_goes_on_without_its_scheduler(tmp_path, scheduler):
    model = net()
    optimizer = SGD(model.parameters())
    path = save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer, scheduler=scheduler(optimizer))
    own = SGD(model.parameters())
    assert load_checkpoint(path, model=model, optimizer=own, ignore=["scheduler"]) == 1
    assert own.state_dict() == optimizer.state_dict()


def test_an_option_that_loading_would_lose_is_named(tmp_path):
    model = net()
    path = save_checkpoint(tmp_path, 1, model=model, optimizer=SGD(model.parameters()))
    own = SGD(model.parameters())
    CYCLES[0](own)  # the scheduler would not find its rates
    with pytest.raises(ValueError, match="group 0 of optimizer has 'base_momentum', that of the checkpoint has not"):
        load_checkpoint(path, model=model, optimizer=own)


def test_a_state_that_an_object_does_not_take_is_taken_back_everywhere(world, tmp_path):
    def read():
        held = parts()
        if dist.get_rank() == 1:
            held["sampler"] = Shards(num_samples=11)
        before = weights(held)
        with pytest.raises(
            ValueError, match=r"sampler does not take its state: ValueError: 12 samples .* \(on rank 1 of 2"
        ):
            load_checkpoint(path, **held)
        assert weights(held) == before
        assert not held["optimizer"].state
        assert held["scheduler"].last_epoch == 0

    path = written(tmp_path, world)
    world.run(read, world_size=2)


def test_a_load_state_dict_that_forgets_is_found_out(tmp_path):
    class Forgetful(Holder):
        def load_state_dict(self, state):
            self.state = {**state, "position": 0}

    path = save_checkpoint(tmp_path, 1, model=nn.Linear(1, 1), sampler=Forgetful({"position": 3}))
    model = nn.Linear(1, 1)
    before, sampler = model.weight.item(), Forgetful({"position": 0})
    with pytest.raises(ValueError, match=r"sampler does not hold.*sampler\['position'\] is 0, it should be 3"):
        load_checkpoint(path, model=model, sampler=sampler)
    assert model.weight.item() == before


@pytest.mark.parametrize(
    ("values", "change"),
    [
        (torch.arange(5.0), lambda values: values.flip(0)),
        (torch.tensor([0.0, 1.0]), lambda values: values * -1 * torch.tensor([1.0, -1.0])),  # makes a minus zero
        (torch.tensor([1, 2]), lambda values: values.int()),
        (np.arange(5), lambda values: values[::-1]),
        (torch.arange(5.0), lambda values: values.numpy()),
    ],
    ids=["order", "sign", "dtype", "array", "kind"],
)
def test_a_load_state_dict_that_changes_values_is_found_out(tmp_path, values, change):
    class Changing(Holder):
        def load_state_dict(self, state):
            self.state = {"steps": [3, change(state["steps"][1])]}

    def load():
        return load_checkpoint(path, average=Changing({}))

    path = save_checkpoint(tmp_path, 3, average=Changing({"steps": [3, values]}))
    with pytest.raises(ValueError, match=r"average does not hold.*average\['steps'\]\[1\] (holds other|is a)"):
        load()
    change = torch.clone if isinstance(values, torch.Tensor) else np.copy
    assert load() == 3


def test_an_object_that_does_not_take_its_own_state_back_keeps_no_other_from_it(tmp_path):
    class Once(Holder):
        def load_state_dict(self, state):
            if not self.state["new"]:
                raise KeyError("once")
            self.state = state

    class Never(Holder):
        def load_state_dict(self, state):
            raise KeyError("never")

    path = save_checkpoint(
        tmp_path, 1, once=Once({"new": False}), model=nn.Linear(1, 1), sampler=Never({"position": 3})
    )
    model = nn.Linear(1, 1)
    before = model.weight.item()
    with pytest.raises(ValueError, match="sampler does not take its state: KeyError: 'never'") as caught:
        load_checkpoint(path, once=Once({"new": True}), model=model, sampler=Never({"position": 0}))
    assert model.weight.item() == before
    assert caught.value.__notes__ == [
        "once does not take back its own state either: KeyError: 'once'",
        "sampler does not take back its own state either: KeyError: 'never'",
    ]


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("load_checkpoint")
def test_wrong_arguments_of_one_rank_are_told_to_all(subject, world, tmp_path):
    def read():
        model = nn.Linear(1, 1)
        with pytest.raises(ValueError, match=r"load_checkpoint was given nothing to save or load.* \(on rank 1 of 2\)"):
            subject(path, **({} if dist.get_rank() else {"model": model}))
        with pytest.raises(TypeError, match=r"load_checkpoint: .* \(on rank 0 of 2\)"):
            subject(path if dist.get_rank() else None, model=model)

    path = save_checkpoint(tmp_path, 1, model=nn.Linear(1, 1))
    world.run(read, world_size=2)


def test_names_must_be_those_that_were_saved_or_be_ignored(tmp_path):
    model = net()
    path = save_checkpoint(tmp_path, 1, model=model, optimizer=SGD(model.parameters()))
    with pytest.raises(ValueError, match=r"also holds 'optimizer': pass optimizer=\.\.\., or ignore=\['optimizer'\]"):
        load_checkpoint(path, model=model)
    with pytest.raises(ValueError, match="holds no 'scaler'; it holds 'model', 'optimizer'"):
        load_checkpoint(path, model=model, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match=r"ignore or reshard names 'optimiser', which .* does not hold"):
        load_checkpoint(path, model=model, ignore=["optimiser"])
    stream = torch.get_rng_state()
    torch.rand(1)
    assert load_checkpoint(path, model=model, ignore=["optimizer", "rng"]) == 1
    assert not torch.equal(stream, torch.get_rng_state())
