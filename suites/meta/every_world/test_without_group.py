"""Tests whose ranks begin without a process group, as a script does under torchrun."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
without_group = pytest.mark.world_size(2, process_group=False)


def summed():
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    return total.item()


def use_own_group(backend="gloo"):
    """Make a group, use it and destroy it, as every script does."""
    dist.init_process_group(backend)
    total = summed()
    dist.destroy_process_group()
    return total


@without_group
def test_there_is_none(rank, world_size):
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        dist.all_reduce(torch.ones(1))
    assert (rank, world_size) == (int(os.environ["RANK"]), 2)


@pytest.mark.world_size(2)
def test_the_next_test_has_its_group_again(rank, group):
    assert dist.group.WORLD is group
    assert (dist.get_rank(), summed()) == (rank, 3)


@without_group
def test_the_environment_is_that_of_a_launcher(rank):
    assert [int(os.environ[name]) for name in VARIABLES] == [rank, rank, 2, 2]
    assert os.environ["MASTER_ADDR"]
    assert int(os.environ["MASTER_PORT"]) > 0


@without_group
@pytest.mark.parametrize("time", range(2))
def test_a_program_makes_its_own_and_destroys_it(rank, time):
    for _ in range(2):
        assert use_own_group() == 3
        assert not dist.is_initialized()


@without_group
def test_a_program_leaves_its_own(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method="env://")
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("gloo")
    dist.new_group([0])
    assert summed() == 3


@pytest.mark.world_size(2)
def test_the_one_that_was_left_is_gone(rank):
    dist.init_process_group("gloo")  # takes the world's group, for the first time
    assert summed() == 3


@without_group
def test_torchs_arguments_are_checked_here_too(monkeypatch):
    with pytest.raises(ValueError, match="device_id"):
        dist.init_process_group("gloo", device_id=torch.device("cpu"))
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ValueError, match="MASTER_ADDR expected"):
        dist.init_process_group("gloo")
    monkeypatch.undo()
    assert use_own_group() == 3


@without_group
def test_a_group_of_one_rank_is_of_one_rank(rank, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    assert (dist.get_rank(), dist.get_world_size(), summed()) == (0, 1, 1)
    dist.destroy_process_group()


@pytest.fixture
def own_group():
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    yield dist.group.WORLD
    assert summed() == 3
    dist.destroy_process_group()


@without_group
@pytest.mark.parametrize("time", range(2))
def test_a_fixture_makes_it_and_destroys_it(own_group, rank, time):
    assert own_group is dist.group.WORLD
    assert summed() == 3


@without_group
class TestOfAClass:
    def test_a_method_begins_without(self):
        assert not dist.is_initialized()

    @pytest.mark.world_size(3)
    def test_a_marker_of_the_method_comes_first(self):
        assert dist.get_world_size() == 3


@pytest.mark.parametrize(
    "begins", [pytest.param(False, marks=without_group), pytest.param(True, marks=pytest.mark.world_size(2))]
)
def test_each_set_of_parameters_has_its_own(begins):
    assert dist.is_initialized() == begins


INNER = """
WITHOUT = pytest.mark.world_size(2, process_group=False)

@WITHOUT
def test_fails_in_its_own_group(rank):
    dist.init_process_group("gloo")
    dist.barrier()
    assert rank == 0

@W
def test_next():
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x == 2

@WITHOUT
def test_waits_for_ever(rank):
    dist.init_process_group("gloo")
    if rank == 0:
        dist.recv(torch.ones(1), 1)

@W
def test_goes_on():
    dist.barrier()

@WITHOUT
def test_asks_for_the_group(group): ...
"""


@pytest.mark.parametrize("world", ["sim", "gloo"])
@pytest.mark.parametrize("isolation", ["pool", "reinit", "fresh"])
def test_what_fails_there_leaves_the_others_alone(run, world, isolation):
    if world == "sim" and isolation != "pool":
        pytest.skip("simulated ranks are new for each test in any case")
    result = run(INNER, f"--isolation={isolation}", world=world)
    ended = result.parseoutcomes()
    assert ended.pop("passed") == 2
    assert sum(ended.values()) == 3  # after a failed set-up, processes report in their single message
    result.stdout.fnmatch_lines(["*begin without a process group*init_process_group()*"])


def test_what_the_marker_takes(run):
    result = run("@pytest.mark.world_size(2, process_group='no')\ndef test_it(): ...", world="sim")
    result.stdout.fnmatch_lines(["*test_it: world_size takes*got process_group='no'; process_group is True or False"])
