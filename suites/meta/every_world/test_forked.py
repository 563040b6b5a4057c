"""A process that a rank forks is not the rank, wherever it returns to."""

from __future__ import annotations

import pytest

PROGRAM = """
import os, sys, time

def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

@pytest.fixture
def noted(tmp_path):
    yield tmp_path / "noted"
    with open(tmp_path / "torn down", "a") as file:
        file.write("x")
    assert (tmp_path / "torn down").read_text() == "x"  # by one process

@W
def test_the_rank_fails(rank):
    if rank == 1:
        if (child := os.fork()) == 0:
            return
        assert ended(child) == 0
        raise ValueError("the rank itself")

@W
@pytest.mark.parametrize(("error", "code"), [(ValueError("the child"), 1), (SystemExit(7), 7), (SystemExit("no"), 1)])
def test_the_child_fails(rank, noted, error, code):
    child = os.fork()
    if child == 0:
        raise error
    assert ended(child) == code
    dist.barrier()

@pytest.fixture
def forks():
    child = os.fork()
    if child:
        yield child
    # a fixture of a child that yields nothing is an error of the child

@W
def test_of_a_fixture(rank, forks):
    assert ended(forks) == 1

def who():
    child = os.fork()
    if child == 0:
        return "child"
    assert ended(child) == 0
    return "rank"

def test_result(world):
    assert world.run(who, world_size=2) == ["rank", "rank"]
    assert world.run(dist.get_rank, world_size=2) == [0, 1]
"""


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_what_a_child_does_is_not_the_rank_s(run, world):
    result = run(PROGRAM, world=world)
    result.assert_outcomes(passed=5, failed=1)
    result.stdout.fnmatch_lines(["*ValueError: the rank itself*"])
