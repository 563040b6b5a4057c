"""Saving writes whole files or none, keeps the last few, and refuses a state that could not be read back."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.errors import CheckpointError
from pdlcheck.primitives import latest_checkpoint, load_checkpoint, save_checkpoint

from .training import Holder, cut, damage, parts, written


@pytest.mark.if_subject_takes("keep")
@pytest.mark.verifies("save_checkpoint")
def test_the_last_k_are_kept_and_torn_ones_do_not_count(subject, tmp_path):
    model = nn.Linear(1, 1)
    for number in range(1, 5):
        subject(tmp_path, number, keep=2, model=model)
    assert [int(path.stem[5:]) for path in sorted(tmp_path.iterdir())] == [3, 4]
    cut(tmp_path / "step_000000000004.ckpt")
    assert latest_checkpoint(tmp_path).stem.endswith("3")
    subject(tmp_path, 5, keep=2, model=model)
    assert sorted(os.listdir(tmp_path))[0].endswith("3.ckpt"), "an intact one had to go for a torn one"
    subject(tmp_path, 2, keep=1, model=model)
    assert [int(path.stem[5:]) for path in sorted(tmp_path.iterdir())] == [2, 3, 4, 5], "later steps are left alone"


@pytest.mark.if_subject_takes("keep")
@pytest.mark.verifies("save_checkpoint")
def test_a_folder_that_is_called_like_a_checkpoint_is_none(subject, tmp_path):
    (tmp_path / "step_000000000001.ckpt").mkdir()
    for step in (2, 3):
        subject(tmp_path, step, keep=1, model=nn.Linear(1, 1))
    assert sorted(os.listdir(tmp_path)) == ["step_000000000001.ckpt", "step_000000000003.ckpt"]


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("save_checkpoint")
def test_what_cannot_be_removed_is_a_warning_for_the_new_one_is_written(subject, tmp_path, monkeypatch):
    def refuse(path, missing_ok=False):
        raise PermissionError(errno.EACCES, "Permission denied")

    first = subject(tmp_path, 1, keep=1, model=nn.Linear(1, 1))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        with pytest.warns(UserWarning, match=f"{first} is too old but could not be removed: Permission denied"):
            second = subject(tmp_path, 2, keep=1, model=nn.Linear(1, 1))
    assert latest_checkpoint(tmp_path) == second


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("latest_checkpoint")
def test_the_newest_that_all_ranks_can_read(subject, world, tmp_path):
    def find():
        found = subject(tmp_path / f"node-{dist.get_rank()}")
        return found and found.name

    for number in (1, 2, 3):
        path = written(tmp_path / "node-0", world, step_number=number)
        (tmp_path / "node-1").mkdir(exist_ok=True)
        (tmp_path / "node-1" / path.name).write_bytes(path.read_bytes())
    assert world.run(find, world_size=2) == ["step_000000000003.ckpt"] * 2
    damage(tmp_path / "node-1" / "step_000000000003.ckpt")
    assert world.run(find, world_size=2) == ["step_000000000002.ckpt"] * 2
    damage(tmp_path / "node-0" / "step_000000000002.ckpt")
    assert world.run(find, world_size=2) == ["step_000000000001.ckpt"] * 2
    (tmp_path / "node-1" / "step_000000000001.ckpt").unlink()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .*rank 0: step_000000000003.ckpt; rank 1: step_0{11}2"
    ):
        world.run(find, world_size=2)
    assert world.run(lambda: subject(tmp_path / "empty"), world_size=2) == [None, None]


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("save_checkpoint")
def test_a_full_disk_leaves_the_previous_and_no_temporary_file(subject, world, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # limit of the process, which simulated ranks share

    def write():
        held = parts()
        if dist.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # the write stops in the middle
        try:
            with pytest.raises(
                CheckpointError, match=r"could not be written: File too large; .*2.ckpt is as it was"
            ) as caught:
                subject(tmp_path, 3, **held)
        finally:
            if dist.get_rank() == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return str(caught.value), latest_checkpoint(tmp_path)

    path = written(tmp_path, world)
    before = path.read_bytes()
    (first, latest), second = world.run(write, world_size=2)
    assert (first, latest) == second
    assert latest == path
    assert os.listdir(tmp_path) == [path.name]
    assert path.read_bytes() == before


@pytest.mark.verifies("save_checkpoint")
def test_weights_that_another_thread_changes_meanwhile_make_no_damaged_file(subject, tmp_path, monkeypatch):
    model, honest = nn.Linear(600, 600), os.write  # large enough for two chunks

    def while_another_trains(descriptor, content):
        with torch.no_grad():
            model.weight += 1
        return honest(descriptor, content)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", while_another_trains)
        path = subject(tmp_path, 1, model=model)
    assert load_checkpoint(path, model=model) == 1


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("save_checkpoint")
def test_a_folder_that_cannot_be_made_is_told_to_all(subject, world, tmp_path):
    (tmp_path / "file").write_text("")

    def write():
        with pytest.raises(CheckpointError, match="could not be written: Not a directory; there is no earlier one"):
            subject(tmp_path / "file" / "folder", 3, model=nn.Linear(1, 1))

    world.run(write, world_size=2)


@pytest.mark.verifies("save_checkpoint")
def test_what_a_killed_writer_left_is_removed_and_what_another_writes_is_not(subject, tmp_path):
    stale = tmp_path / ".step_000000000001.ckpt.0123abcd.tmp"
    written_now = tmp_path / ".step_000000000001.ckpt.4567cdef.tmp"
    foreign = tmp_path / ".step_1.tmp"
    for path in (stale, written_now, foreign):
        path.write_bytes(b"half")
    with written_now.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        subject(tmp_path, 2, model=nn.Linear(1, 1))
    assert not stale.exists()
    assert written_now.exists()
    assert foreign.exists()


@pytest.mark.verifies("save_checkpoint")
def test_a_file_system_without_locks_keeps_checkpoints_too(subject, tmp_path, monkeypatch):
    def unknown(descriptor, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unknown)
    left = tmp_path / ".step_000000000001.ckpt.0123abcd.tmp"
    left.write_bytes(b"half")
    path = subject(tmp_path, 2, model=nn.Linear(1, 1))
    assert latest_checkpoint(tmp_path) == path
    assert sorted(os.listdir(tmp_path)) == [left.name, path.name], "it may be another's, who writes it now"


UNREADABLE = [
    ({"held": object()}, r"holder\['held'\] is of type object"),
    ({"f": [len]}, r"holder\['f'\]\[0\] is of type builtin_function_or_method"),
    ({(1, 2): 3}, "holder has a key of type tuple"),
    ({"t": torch.ones(2).to_sparse()}, "a tensor torch.sparse_coo.*takes dense tensors"),
    ({"t": torch.ones(2, device="meta")}, "on the meta device"),
    ({"a": np.ones(2, dtype=">f4")}, r"holder\['a'\] is an array of >f4"),
    ({b"": 3}, "holder has a key that weights_only=True does not load"),
    ({2**2039: 3}, "holder has a key that weights_only=True does not load"),
    ({"a": np.array(["x"], dtype=object)}, "an array of object"),
    ({"i": np.int64(3)}, "is of type int64"),
]


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("save_checkpoint")
@pytest.mark.parametrize(("state", "message"), UNREADABLE, ids=[message[:24] for _, message in UNREADABLE])
def test_a_state_that_could_not_be_read_back_is_not_written(subject, world, tmp_path, state, message):
    def write():  # only rank 1 has the bad state
        with pytest.raises(TypeError, match=message):
            subject(tmp_path, 1, holder=Holder(state if dist.get_rank() == 1 else {}))

    world.run(write, world_size=2)
    assert not os.listdir(tmp_path)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("save_checkpoint")
def test_ranks_that_save_different_things_all_hear_of_it(subject, world, tmp_path):
    def steps():
        subject(tmp_path, dist.get_rank(), model=nn.Linear(1, 1))

    def names():
        subject(tmp_path, 1, **{f"model{dist.get_rank()}": nn.Linear(1, 1)})

    with pytest.raises(ValueError, match="save different things: step is 0 on rank 0 and 1 on rank 1"):
        world.run(steps, world_size=2)
    with pytest.raises(ValueError, match=r"objects is \['model0'\] on rank 0 and \['model1'\] on rank 1"):
        world.run(names, world_size=2)
    assert not os.listdir(tmp_path)


BAD = [
    ({"step": -1}, ValueError, "needs step of at least 0, got step=-1"),
    ({"step": 10**12}, ValueError, "needs a step below 1000000000000, .* got step=1000000000000"),
    ({"step": 1.0}, TypeError, "takes step as an int, got float"),
    ({"keep": 0}, ValueError, "needs keep of at least 1, got keep=0"),
    ({"model": 3}, TypeError, "model is of type int, without state_dict and load_state_dict"),
    ({"rng": nn.Linear(1, 1)}, ValueError, "'rng' names the random streams"),
    ({"path": nn.Linear(1, 1)}, ValueError, "'path' is an argument of load_checkpoint; call the object otherwise"),
    ({"ignore": nn.Linear(1, 1)}, ValueError, "'ignore' is an argument of load_checkpoint"),
    ({"reshard": nn.Linear(1, 1)}, ValueError, "'reshard' is an argument of load_checkpoint"),
]


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("save_checkpoint")
@pytest.mark.parametrize(("arguments", "kind", "message"), BAD, ids=[message[:24] for *_, message in BAD])
def test_wrong_arguments_are_named(subject, tmp_path, arguments, kind, message):
    with pytest.raises(kind, match=message):
        subject(**{"folder": tmp_path, "step": 1, "model": nn.Linear(1, 1), **arguments})
    assert not os.listdir(tmp_path)


WRONG = [({"step": -1}, "needs step of at least 0, got step=-1"), ({"keep": 0}, "keep=0"), ({"model": 3}, "type int")]


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("save_checkpoint")
@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[message[-8:] for _, message in WRONG])
def test_wrong_arguments_of_one_rank_are_told_to_all(subject, world, tmp_path, arguments, message):
    def save():
        mine = arguments if dist.get_rank() == 1 else {}
        with pytest.raises((TypeError, ValueError), match=rf"^save_checkpoint.*{message}.*on rank 1 of 2") as caught:
            subject(**{"folder": tmp_path, "step": 1, "model": nn.Linear(1, 1), **mine})
        return str(caught.value)

    first, second = world.run(save, world_size=2)
    assert first == second
    assert first.count("save_checkpoint") == 1
    assert not os.listdir(tmp_path)


def test_nothing_to_save_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"nothing to save or load; pass model="):
        save_checkpoint(tmp_path, 1)
