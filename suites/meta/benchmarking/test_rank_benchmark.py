"""The fixture ``rank_benchmark``: its rows, its ratios, refused uses, and runs in which it times nothing."""

from __future__ import annotations

import json
import re

import pytest

from ..clone import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
PROGRAM = """
import time
import pytest
import torch
import torch.distributed as dist

"""

# Inner runs share this process and its filters; a run without measurements warns.
pytestmark = pytest.mark.filterwarnings("ignore::pytest_benchmark.logger.PytestBenchmarkWarning")


@pytest.fixture
def rows(pytester, monkeypatch):
    """Return a function that runs a test file, and returns the result and the JSON rows by name."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # in an xdist worker pytest-benchmark measures nothing

    def run(source, *options, world="gloo"):
        pytester.makepyfile(PROGRAM + source)
        quick = ("--benchmark-max-time=0.02", "--benchmark-json=found.json", "-p", "no:cacheprovider")
        result = pytester.runpytest_inprocess("--world", world, *quick, *options)
        file = pytester.path / "found.json"
        found = json.loads(file.read_text()) if file.exists() and file.stat().st_size else {"benchmarks": []}
        return result, {row["name"]: row for row in found["benchmarks"]}, found.get("machine_info", {})

    return run


def test_a_row_is_the_slowest_rank_and_has_the_ratio_to_what_took_turns(rows):
    result, found, machine = rows(
        """
@pytest.mark.world_size(2)
@pytest.mark.benchmark(group="mine")
def test_steps(rank_benchmark, rank):
    def slow_on_rank_1(seconds): time.sleep(seconds * (1 + rank)); return rank
    def twice(seconds): time.sleep(2 * seconds * (1 + rank))
    kept = rank_benchmark(
        slow_on_rank_1, 0.01, against={"twice": twice}, nbytes=2_000_000, operation="all_reduce", facts={"N": 7},
    )
    assert kept == rank
"""
    )
    assert result.ret == 0
    assert list(found) == ["test_steps[2ranks]", "test_steps[2ranks] [twice]"]  # without the world: rows pair up
    ours, other = found.values()
    facts = ours["extra_info"]
    assert ours["stats"]["min"] >= 0.02
    assert other["stats"]["min"] >= 0.04
    assert ours["group"] == "mine"
    assert 0.01 <= facts["fastest_rank_s"] < 0.02  # rank 0
    ratio, low, high = facts["over"]["twice"]
    assert low <= ratio <= high
    assert 0.4 < ratio < 0.6
    assert facts["busbw_GBps"] == facts["algbw_GBps"] == pytest.approx(2e-3 / facts["median_s"])
    assert (facts["world"], facts["world_size"], facts["device"], facts["N"]) == ("gloo", 2, "cpu", 7)
    assert facts["host_peak_bytes"] > 1 << 20
    assert other["extra_info"]["way"] == "twice"
    assert machine["pdlcheck"]["usable_cores"] >= 1
    assert "torch" in machine["pdlcheck"]["packages"]
    result.stdout.fnmatch_lines(["rank benchmarks: *", "*test_steps[[]2ranks[]] *"])


@pytest.mark.slow
def test_ranks_whose_clocks_disagree_make_as_many_rounds(rows):
    result, found, _ = rows(
        """
@pytest.mark.world_size(3)
def test_uneven(rank_benchmark, rank):
    calls = []
    def work():
        calls.append(0)
        time.sleep(0.0005 * rank)
        dist.all_reduce(torch.ones(1))
    rank_benchmark(work)
    mine = torch.tensor([len(calls)])
    least, most = mine.clone(), mine.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    assert least == most
"""
    )
    assert result.ret == 0
    assert found["test_uneven[3ranks]"]["stats"]["rounds"] >= 5


def test_a_fast_wrong_result_fails(rows):
    """The broken subject forgets the last element; its twin is right."""
    result, found, _ = rows(
        """
def ones(n): return torch.ones(n)
def forgets(n): return torch.ones(n - 1)
def wrong(result): return 4 - int(result.sum())

@pytest.mark.world_size(2)
def test_right(rank_benchmark): rank_benchmark(ones, 4, check=wrong)

@pytest.mark.world_size(2)
def test_wrong(rank_benchmark): rank_benchmark(ones, 4, check=wrong, against=forgets)

@pytest.mark.world_size(2)
def test_wrong_afterwards(rank_benchmark): assert rank_benchmark(forgets, 4).sum() == 4

def test_wrong_in_the_controller(world, rank_benchmark): assert rank_benchmark(ones, 4, world_size=2) == []
"""
    )
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines(["*rank_benchmark: forgets returned 1 wrong elements; its times do not count*"])
    assert list(found) == ["test_right[2ranks]"]
    assert found["test_right[2ranks]"]["extra_info"]["wrong"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--benchmark-disable"]], ids=["timed", "disabled"])
def test_a_wrong_result_in_place_is_not_hidden_by_the_function_that_runs_next(rows, options):
    result, *_ = rows(
        """
@pytest.mark.world_size(2)
def test_wrong(rank_benchmark):
    tensor = torch.zeros(4)
    def forgets(): tensor[1:] += 1
    def right(): tensor.add_(1)
    wrong = lambda _: int((tensor != 1).sum())
    rank_benchmark(forgets, against={"right": right}, setup=tensor.zero_, check=wrong)
""",
        *options,
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*rank_benchmark: forgets returned 1 wrong elements*"])


@pytest.mark.slow
def test_with_the_fixture_world_it_calls_ranks(rows):
    result, found, _ = rows(
        """
def doubled(x): dist.barrier(); return 2 * x

def test_called(world, rank_benchmark):
    assert rank_benchmark(doubled, 4, world_size=2) == [8, 8]
"""
    )
    assert result.ret == 0
    assert list(found) == ["test_called[2ranks]"]
    assert found["test_called[2ranks]"]["extra_info"]["world_size"] == 2


@pytest.mark.parametrize("how", [["--benchmark-disable"], ["sim"]], ids=["disabled", "sim"])
def test_untimed_it_still_calls_and_checks(rows, how):
    world, options = ("sim", []) if how == ["sim"] else ("gloo", how)
    result, found, _ = rows(
        """
@pytest.mark.world_size(2)
def test_once(rank_benchmark, rank):
    calls = []
    assert rank_benchmark(lambda: calls.append(1) or rank, check=lambda result: int(result != rank)) == rank
    assert calls == [1]

@pytest.mark.world_size(2)
def test_wrong(rank_benchmark): rank_benchmark(lambda: 0, check=lambda result: 1)
""",
        *options,
        world=world,
    )
    result.assert_outcomes(passed=1, failed=1)
    assert not found
    said = "rank benchmarks: 2 tests ran once on sim, whose ranks take turns, so nothing was timed"
    assert (said in result.stdout.str()) == (world == "sim")


@pytest.mark.slow
def test_setup_is_not_timed_and_precedes_each_sample(rows):
    result, found, _ = rows(
        """
@pytest.mark.world_size(1)
def test_sorted(rank_benchmark):
    values = []
    def setup(): values[:] = [3, 1, 2]; time.sleep(0.01)
    assert rank_benchmark(values.sort, setup=setup, check=lambda _: int(values != [1, 2, 3])) is None
"""
    )
    assert result.ret == 0
    assert found["test_sorted[1ranks]"]["stats"]["max"] < 0.01
    assert found["test_sorted[1ranks]"]["stats"]["iterations"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("rank_benchmark(int); rank_benchmark(int)", "*has measured already; parametrize the test*"),
        ("rank_benchmark(int, operation='all_reduce')", "*operation needs nbytes*got 'all_reduce'*"),
        ("rank_benchmark(int, nbytes=4, operation='sum')", "*must be one of all_gather, all_reduce*got 'sum'*"),
        ("rank_benchmark(int, against={'int': float})", "*two functions are called 'int'*"),
        ("rank_benchmark(int, iterations=0)", "*iterations must be at least 1, got 0*"),
        ("rank_benchmark(int, world_size=2)", "*the marker names the ranks of this test; remove world_size=2*"),
    ],
)
def test_bad_arguments_are_named(rows, call, words):
    result, *_ = rows(f"""
@pytest.mark.world_size(1)
def test_bad(rank_benchmark): {call}
""")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([words])


def test_without_ranks_of_its_own_a_test_must_say_how_many(rows):
    result, *_ = rows("def test_bad(world, rank_benchmark): rank_benchmark(int)")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*pass world_size=2, or mark the test*"])


@pytest.mark.slow
def test_a_timed_test_and_others_on_as_many_ranks_do_not_disturb_each_other(rows):
    """The timed test runs on unwatched processes, the other tests on watched ones."""
    result, found, _ = rows(
        """
@pytest.mark.world_size(2)
def test_before(rank): dist.barrier()

@pytest.mark.world_size(2)
def test_timed(rank_benchmark): rank_benchmark(dist.barrier)

@pytest.mark.world_size(2)
def test_mismatch(rank):
    if rank: dist.all_reduce(torch.ones(2))
    else: dist.all_reduce(torch.ones(3))
""",
        "-p",
        "no:randomly",
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*CollectiveMismatch*"])
    assert list(found) == ["test_timed[2ranks]"]


@pytest.mark.slow
@pytest.mark.skipif(not PAGE.exists(), reason="needs docs/: run it in a clone")
def test_the_example_of_the_page_runs_as_it_stands(rows):
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    result, found, _ = rows(source)
    assert result.ret == 0
    assert list(found) == ["test_my_all_reduce[2ranks]", "test_my_all_reduce[2ranks] [torch]"]
    assert {"busbw_GBps", "over", "wrong"} <= set(found["test_my_all_reduce[2ranks]"]["extra_info"])
