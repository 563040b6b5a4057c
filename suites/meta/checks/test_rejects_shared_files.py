"""check_resume rejects trainings in which several ranks write one file, and accepts the correct twins."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_resume


def training(save):
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
            save(path, model.state_dict())

        return model, step, save_model, load

    return start


def by_all(path, state):
    if state is not None:
        torch.save(state, path)
    return path


def by_all_in_a_folder_through_another_name(path, state):
    path.mkdir(exist_ok=True)
    if state is not None:
        part = path / f"part-{dist.get_rank()}"
        torch.save(state, part)
        os.replace(part, path / "last.pt")
    return path / "last.pt"


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
    """Cannot be told: with a folder for each rank, that of the others is missing."""
    if dist.get_rank() == 0:
        path.mkdir(exist_ok=True)
    dist.barrier()
    return by_each_under_its_name_and_a_lock(path, state) if path.is_dir() else by_all(path / "last.pt", state)


@pytest.mark.parametrize(
    ("save", "name"), [(by_all, "saved"), (by_all_in_a_folder_through_another_name, "saved/last.pt")]
)
def test_a_file_that_all_ranks_write_is_named(world, save, name):
    with pytest.raises(AssertionError, match=rf"start: ranks 0, 1 all write the file {name}\n.* the last one to write"):
        check_resume(training(save), world)


@pytest.mark.parametrize(
    "save", [by_rank_0, by_each_under_its_name_and_a_lock, by_all_once_rank_0_has_made_the_folder]
)
def test_the_correct_twins_pass(world, save):
    check_resume(training(save), world)
