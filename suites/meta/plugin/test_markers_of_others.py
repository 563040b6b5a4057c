"""Test files of DeepSpeed and Composer, and their marker on single parameters."""

from __future__ import annotations

import re


def test_a_file_of_deepspeed_runs_as_it_stands(run):
    run(
        """
import deepspeed_like

class TestReduce:
    world_size = 4  # what its own harness would read

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
    def test(self, dtype, tmpdir, class_tmpdir):
        x = torch.ones(3, dtype=dtype) * (dist.get_rank() + 1)
        dist.all_reduce(x)
        assert torch.all(x == 3)

    @pytest.mark.world_size([2, 3])
    def test_sizes(self, rank): dist.barrier()

@pytest.fixture
def class_tmpdir(tmpdir): return tmpdir
""",
        deepspeed_like="",
    ).assert_outcomes(passed=4)


COMPOSERS = """
def world_size(*sizes):  # Composer's own decorator puts the marker on single parameters, and none for one rank
    marked = [pytest.param(n, marks=pytest.mark.world_size(n)) if n > 1 else pytest.param(1) for n in sizes]
    return pytest.mark.parametrize("world_size", marked)

@world_size(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_sum(world_size, dtype):
    assert (dist.get_world_size() if dist.is_initialized() else 1) == world_size
    x = torch.ones(3, dtype=dtype)
    if world_size > 1:
        dist.all_reduce(x)
    assert torch.all(x == world_size)
"""


def test_a_file_of_composer_runs_as_it_stands(run):
    result = run(COMPOSERS, "-v", "--world", "sim,gloo")
    result.assert_outcomes(passed=10)
    ids = re.findall(r"test_sum\[(\S+)\] PASSED", result.stdout.str())
    dtypes = "torch.float32", "torch.int64"
    cases = {"": 1, "sim-2-": 2, "gloo-2-": 2, "sim-3-": 3, "gloo-3-": 3}
    assert ids == [f"{case}{dtype}-{size}" for case, size in cases.items() for dtype in dtypes]


def test_a_marker_on_a_single_parameter_counts_more_than_that_of_the_test(run):
    run(
        """
@W
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=[pytest.mark.world_size(3, 4), pytest.mark.xfail])])
def test_sizes(n, world_size):
    assert n == world_size == 2
"""
    ).assert_outcomes(passed=1, xfailed=2)


def test_a_marker_on_a_single_parameter_names_the_test_where_it_is_wrong(run):
    result = run(
        """
@pytest.mark.parametrize("n", [2, pytest.param(0, marks=pytest.mark.world_size(0))])
def test_sizes(n): pass
"""
    )
    result.stdout.fnmatch_lines("*test_sizes: world_size takes numbers of ranks from 1 to 10000*got 0")
    result.stdout.no_fnmatch_line("*Traceback*")


def test_parameters_without_the_marker_beside_the_fixture_world_are_refused(run):
    result = run(
        """
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=W)])
def test_sizes(n, world): pass
"""
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("*test_sizes: world_size on some parameters of a test that uses the fixture world;*")
