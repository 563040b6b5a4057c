"""Tests on processes share some state with one another, and find other state new."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

import pdlcheck.item_runners.processes.items  # noqa: F401  # inner runs forget the modules that they import
from pdlcheck.worlds import get_world
from pdlcheck.worlds.processes import ProcessWorld


@pytest.fixture(params=[True, False], ids=["watched", "plain"])
def world(request):  # replaces the plugin's fixture of this name
    world = ProcessWorld(watch=request.param)
    yield world
    world.close()


def describe():
    """Make a group; return the process, the name of the group, and the number of groups."""
    group = dist.new_group([0, 1])
    dist.barrier(group)
    return os.getpid(), group.group_name, len(dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize(
    ("isolation", "same_processes", "same_groups"),
    [("pool", True, True), ("reinit", True, False), ("fresh", False, False)],
)
def test_what_two_runs_share(world, isolation, same_processes, same_groups):
    world.isolation = isolation
    pid, name, number = world.run(describe, world_size=2)[0]
    other_pid, other_name, other_number = world.run(describe, world_size=2)[0]
    assert (pid == other_pid) == same_processes
    assert (other_number == number + 1) == same_groups
    assert (other_name != name) == same_groups  # torch names groups by their number


def test_a_default_group_that_a_test_has_destroyed_is_made_again(world):
    world.isolation = "reinit"
    pids = world.pids(2)
    for _ in range(3):
        world.run(dist.barrier, world_size=2)
    assert world.pids(2) == pids
    world.run(dist.destroy_process_group, world_size=2)
    world.run(dist.barrier, world_size=2)


def test_a_fresh_run_leaves_the_kept_processes_alone(world):
    pids = world.pids(2)
    world.isolation = "fresh"
    assert set(world.run(os.getpid, world_size=2)).isdisjoint(pids)
    world.isolation = "pool"
    assert world.pids(2) == pids


def test_nothing_runs_after_a_fresh_run(world):
    world.isolation = "fresh"
    for pid in world.run(os.getpid, world_size=2):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_unknown_isolation_is_named():
    with pytest.raises(ValueError, match="isolation must be one of pool, reinit, fresh; got 'none'"):
        get_world("gloo", isolation="none")


FILE = """
import os, pytest, torch.distributed as dist

pids = []

@pytest.mark.world_size(2)
@pytest.mark.isolation("fresh")
@pytest.mark.parametrize("number", [1, 2])
def test_fresh(number):
    pids.append(os.getpid())
    dist.barrier()
    assert len(pids) == 1

@pytest.mark.world_size(2)
@pytest.mark.parametrize("number", [1, 2])
def test_as_the_option_says(number):
    pids.append(os.getpid())
    dist.barrier()
    assert len(pids) == number

@pytest.fixture(scope="module")
def kept():
    yield
    raise RuntimeError("a fixture of the module is torn down")

@pytest.mark.isolation("fresh")
@pytest.mark.world_size(2)
def test_fixture_of_fresh_ranks(kept):
    pass

@pytest.mark.isolation("fresh")
def test_of_a_controller(world):
    assert world.run(os.getpid, world_size=2) != world.run(os.getpid, world_size=2)

@pytest.mark.isolation("none")
@pytest.mark.world_size(2)
def test_wrong():
    pass
"""


def test_the_marker_and_the_option(pytester):
    pytester.makepyfile(FILE)
    result = pytester.runpytest_inprocess("--world", "gloo", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=6, errors=2)
    result.stdout.fnmatch_lines(["*RuntimeError: a fixture of the module is torn down"])
    result.stdout.fnmatch_lines(
        ["*test_wrong*isolation takes one of pool, reinit, fresh, such as isolation('fresh'); got 'none'*"]
    )
    result = pytester.runpytest_inprocess("--world", "gloo", "--isolation", "fresh", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=5, failed=1, errors=2)
    result.stdout.fnmatch_lines(["FAILED *test_as_the_option_says[[]gloo-2-2]*"])
