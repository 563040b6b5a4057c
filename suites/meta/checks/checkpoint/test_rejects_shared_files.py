"""check_resume rejects trainings in which several ranks write one file, and accepts the correct twins."""

from __future__ import annotations

import os
import shutil
from os import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_resume


def training(save, *, write_in_turn=False):
    """Return a training that saves with ``save``.

    With ``write_in_turn`` the highest rank writes first, so that the file of rank 0 remains.
    """

    def start():
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(i):
            optimizer.zero_grad()
            model(torch.tensor([[1.0, i]])).square().mean().backward()
            optimizer.step()

        def load(path):
            model.load_state_dict(torch.load(save(path, None), weights_only=True))

        def save_model(path):
            ranks = reversed(range(dist.get_world_size())) if write_in_turn else [dist.get_rank()]
            for rank in ranks:
                if rank == dist.get_rank():
                    save(path, model.state_dict())
                if write_in_turn:
                    dist.barrier()

        return model, step, save_model, load

    return start


def by_all(path, state):
    if state is not None:
        torch.save(state, path)
    return path


def by_all_in_a_folder(path, state):
    path.mkdir(exist_ok=True)
    return by_all(path / "last.pt", state)


def through_another_name(path, state, name):
    path.mkdir(exist_ok=True)
    if state is not None:
        torch.save(state, path / name)
        os.replace(path / name, path / "last.pt")
    return path / "last.pt"


def by_all_through_a_name_of_their_own(path, state):
    return through_another_name(path, state, f"part-{dist.get_rank()}")


def by_all_in_a_folder_of_their_own(path, state):
    """Write on each rank into its own folder, and rename the folder of rank 0 only."""
    if state is not None:
        folder = path.with_name(f"{path.name}-{dist.get_rank()}")
        by_all_in_a_folder(folder, state)
        if dist.get_rank() == 0:
            folder.rename(path)
        dist.barrier()
    return path / "last.pt"


def by_all_through_one_name(path, state):
    return through_another_name(path, state, "part")


def different_ones_by_all(path, state):
    if state is not None:
        state = state | {"bias": state["bias"] + dist.get_rank()}
    return by_all_through_a_name_of_their_own(path, state)


def by_rank_0(path, state):
    if state is not None and dist.get_rank() == 0:
        torch.save(state, path)
    return path


def by_each_under_its_name_and_a_lock(path, state):
    path.mkdir(exist_ok=True)
    own = path / f"rank-{dist.get_rank()}.pt"
    if state is not None:
        (path / "lock").touch()
        torch.save(state, own)
    return own


def by_all_once_rank_0_has_made_the_folder(path, state):
    """Write one file per rank into a folder that rank 0 makes.

    The check accepts this without a test: it gives each rank a separate path, where only rank 0 finds a folder.
    """
    if dist.get_rank() == 0:
        path.mkdir(exist_ok=True)
    dist.barrier()
    return by_each_under_its_name_and_a_lock(path, state) if path.is_dir() else by_all(path / "last.pt", state)


@pytest.mark.parametrize(("save", "name"), [(by_all, "saved"), (by_all_in_a_folder, "saved/last.pt")])
def test_a_file_that_all_ranks_write_is_named(world, save, name):
    words = rf"start: ranks 0, 1 all write the file {name}\n.* the last one to write wins, .* meets half of it"
    with pytest.raises(AssertionError, match=words):
        check_resume(training(save), world)


def test_a_temporary_file_that_all_ranks_write_is_named(world):
    words = r"ranks 0, 1 all write the file saved/part, which becomes saved/last\.pt\n.* not in the temporary name"
    with pytest.raises(AssertionError, match=words):
        check_resume(training(by_all_through_one_name, write_in_turn=True), world)


def test_a_name_that_ranks_give_to_different_files_is_named(world):
    words = (
        r"ranks 0, 1 all give a file of theirs the name saved/last\.pt, and not the same one\n.* others saved is lost"
    )
    with pytest.raises(AssertionError, match=words):
        check_resume(training(different_ones_by_all, write_in_turn=True), world)


@pytest.mark.parametrize(
    "save",
    [
        by_rank_0,
        by_each_under_its_name_and_a_lock,
        by_all_once_rank_0_has_made_the_folder,
        by_all_through_a_name_of_their_own,
        by_all_in_a_folder_of_their_own,
    ],
)
def test_the_correct_twins_pass(world, save):
    check_resume(training(save), world)


def test_renaming_is_as_before_after_a_check(world):
    before = os.rename, os.replace, replace
    check_resume(training(by_all_through_a_name_of_their_own), world)
    assert (os.rename, os.replace, replace) == before


def by_a_name_of_its_own(src, dst):
    replace(src, dst)


def by_the_name_of_os(src, dst):
    os.rename(src, dst)


@pytest.mark.parametrize("rename", [by_a_name_of_its_own, by_the_name_of_os, shutil.move, Path.replace])
def test_a_name_is_known_by_whatever_function_a_file_gets_it(world, rename):
    """The check also follows functions that were imported before it ran."""

    def through(name):
        def save(path, state):
            path.mkdir(exist_ok=True)
            if state is not None:
                torch.save(state, path / name())
                rename(path / name(), path / "last.pt")
            return path / "last.pt"

        return save

    check_resume(training(through(lambda: f"part-{dist.get_rank()}")), world)
    with pytest.raises(AssertionError, match=r"ranks 0, 1 all write the file saved/part, which becomes saved/last\.pt"):
        check_resume(training(through(lambda: "part"), write_in_turn=True), world)
