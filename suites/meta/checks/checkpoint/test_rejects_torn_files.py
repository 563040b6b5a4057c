"""The check of torn files rejects loaders that accept them or leave ranks waiting, and accepts the correct twins."""

from __future__ import annotations

import hashlib
from traceback import StackSummary

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from pdlcheck.checks import check_torn_files
from pdlcheck.errors import Inconclusive

from .trainers import honest_load, honest_save, trainer


def digests_save(parts, path):
    honest_save(parts, path)
    file = path / f"rank{dist.get_rank()}.pt"
    file.with_suffix(".sha256").write_text(hashlib.sha256(file.read_bytes()).hexdigest())


def intact(path, rank):
    file = path / f"rank{rank}.pt"
    return hashlib.sha256(file.read_bytes()).hexdigest().encode() == file.with_suffix(".sha256").read_bytes()


def agrees(parts, path):
    """Raise on every rank if the file of any rank is damaged."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, intact(path, dist.get_rank()))
    if not all(everyone):
        raise ValueError(f"the file of rank {everyone.index(False)} is damaged")
    honest_load(parts, path)


def agrees_by_an_error_that_is_no_exception(parts, path):
    """Raise an error that is not an ``Exception``, as torch.distributed.checkpoint does."""
    try:
        agrees(parts, path)
    except ValueError as error:
        raise CheckpointException("load", {0: (error, StackSummary())}) from error


def decides_alone(parts, path):
    if not intact(path, dist.get_rank()):
        raise ValueError("damaged")
    honest_load(parts, path)


def starts_anew(parts, path):
    if intact(path, dist.get_rank()):
        honest_load(parts, path)


def loads_the_model_first(parts, path):
    parts["model"].load_state_dict({k: v + 1 for k, v in parts["model"].state_dict().items()})
    agrees(parts, path)


def reads_on_rank_0(parts, path):
    state = [None]
    if dist.get_rank() == 0:
        if not all(intact(path, rank) for rank in range(2)):
            raise ValueError("damaged")
        state = [True]
    dist.broadcast_object_list(state, 0)
    honest_load(parts, path)


@pytest.mark.parametrize("load", [agrees, agrees_by_an_error_that_is_no_exception])
def test_the_correct_twin_refuses(world, load):
    told = check_torn_files(trainer(load, digests_save), world, count=8)
    assert len(told) == 8
    assert all("the file of rank" in line and "is damaged" in line for line in told)
    assert any("was cut at byte" in line for line in told)
    assert any("was flipped" in line for line in told)


TORN = [
    (honest_load, r"loaded a checkpoint of which bit \d of byte \d+ of rank\d.pt .*no digest of the file is compared"),
    (decides_alone, r"loaded a checkpoint of which .* others +rank \d: ValueError: damaged.*each rank decides alone"),
    (starts_anew, r"loaded a checkpoint of which"),
    (
        loads_the_model_first,
        r"refused the checkpoint \(.*\), but parameter .* is not as before.*some of the file was loaded",
    ),
]


@pytest.mark.parametrize(("broken", "message"), TORN, ids=[broken.__name__ for broken, _ in TORN])
def test_check_torn_files_rejects(world, broken, message):
    with pytest.raises(AssertionError, match=f"(?s){message}"):
        check_torn_files(trainer(broken, digests_save if broken is not honest_load else honest_save), world)


def test_check_torn_files_sees_a_rank_that_is_left_waiting():
    from pdlcheck.worlds import get_world

    with pytest.raises(AssertionError, match=r"(?s)left waiting where .* one rank reads the file and raises"):
        check_torn_files(trainer(reads_on_rank_0, digests_save), get_world("sim"))


def test_a_trainer_that_refuses_everything_is_inconclusive(world):
    def load(parts, path):
        raise ValueError("never")

    with pytest.raises(Inconclusive, match="rank 0 refuses the intact file too: ValueError: never"):
        check_torn_files(trainer(load), world)


def test_a_trainer_that_writes_nothing_is_inconclusive(world):
    with pytest.raises(Inconclusive, match="save wrote nothing"):
        check_torn_files(trainer(save=lambda parts, path: None), world)
