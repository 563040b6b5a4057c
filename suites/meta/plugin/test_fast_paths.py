"""The option that switches all fast paths off: verdicts and reports stay the same."""

from __future__ import annotations

import re

import pytest

TESTS = """
import logging
import pytest, torch, torch.distributed as dist

@pytest.mark.world_size(2)
def test_sum(rank):
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    assert x.item() == 3

@pytest.mark.world_size(2)
def test_sum_again(rank, world_size):
    logging.getLogger("mine").warning("on rank %d", rank)
    dist.barrier()

@pytest.mark.world_size(2)
def test_wrong_on_rank_1(rank):
    logging.getLogger("mine").warning("before the failure")
    assert rank == 0

@pytest.mark.world_size(2)
@pytest.mark.xfail(strict=True)
def test_known_to_fail(rank):
    assert rank == 2

@pytest.mark.world_size(2)
def test_skipped(rank, tmp_path):
    if rank == 1:
        pytest.skip("not here")
    dist.barrier()
"""
CONFTEST = """
from pdlcheck.harness.fastpath.single_message import fits_single_message

def pytest_collection_finish(session):
    if hasattr(session.config, "workerinput") or session.config.getoption("collectonly"):
        return
    print("fit one message:", [item.name for item in session.items if fits_single_message(item)])
"""


def seen(result):
    """Return the verdicts and the report, without times and addresses."""
    lines = [re.sub(r"\d+\.\d+s|0x[0-9a-f]+|port \d+", "", line) for line in result.outlines]
    return [line for line in lines if line.startswith(("E ", ">", "test_", "FAILED", "SKIPPED", "WARNING"))]


@pytest.mark.parametrize("world", ["sim", pytest.param("gloo", marks=pytest.mark.slow)])
def test_verdicts_and_reports_are_the_same_without_fast_paths(pytester, world):
    pytester.makepyfile(test_ranks=TESTS)
    with_them = pytester.runpytest_inprocess("--world", world, "-v", "-rs", "-p", "no:cacheprovider")
    without = pytester.runpytest_inprocess("--world", world, "-v", "-rs", "-p", "no:cacheprovider", "--pdl-plain")
    with_them.assert_outcomes(passed=2, failed=1, xfailed=1, skipped=1)
    without.assert_outcomes(passed=2, failed=1, xfailed=1, skipped=1)
    assert seen(with_them) == seen(without)
    assert any("rank == 0" in line for line in seen(without))


def test_the_option_and_the_variable_switch_them_off(pytester, monkeypatch):
    pytester.makepyfile(test_ranks=TESTS)
    pytester.makeconftest(CONFTEST)
    on = pytester.runpytest_inprocess("--world", "sim", "-s", "-k", "sum")
    on.stdout.fnmatch_lines(["*fit one message: [[]'test_sum[[]sim-2[]]', 'test_sum_again[[]sim-2[]]'[]]*"])
    off = pytester.runpytest_inprocess("--world", "sim", "-s", "-k", "sum", "--pdl-plain")
    off.stdout.fnmatch_lines(["*fit one message: [[][]]*"])
    monkeypatch.setenv("PDLCHECK_PLAIN", "1")
    off = pytester.runpytest_subprocess("--world", "sim", "-s", "-k", "sum")
    off.stdout.fnmatch_lines(["*fit one message: [[][]]*"])
