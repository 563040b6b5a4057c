"""Hooks of a rank's session that read reports get those of passed phases; without such a hook none are made."""

from __future__ import annotations

import pytest

SEES = """
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    setattr(item, f"report_{report.when}", report)
    return report
"""
SOURCE = """
@pytest.fixture
def looks(request, tmp_path):
    yield
    print("teardown sees", sorted(name for name in vars(request.node) if name.startswith("report_")))

@W
def test_passes(rank, looks): assert True

@W
@pytest.mark.xfail(strict=True, reason="we thought so")
def test_passes_unexpectedly(rank): pass

@W
def test_fails(rank, looks): assert False
"""


def test_a_hook_of_a_conftest_file_sees_the_phases_that_passed(run):
    result = run(SOURCE, "-rA", conftest=SEES)
    result.assert_outcomes(passed=1, failed=2)
    said = result.stdout.str()
    assert said.count("teardown sees ['report_call', 'report_setup']") == 4  # two tests, two ranks
    assert "[XPASS(strict)] we thought so" in said


def test_without_such_a_hook_results_are_the_same(run):
    result = run(SOURCE, "-rA")
    result.assert_outcomes(passed=1, failed=2)
    assert result.stdout.str().count("teardown sees []") == 4
    assert "[XPASS(strict)] we thought so" in result.stdout.str()


TURNS = """
import pytest

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call" and "turned" in item.name:
        report.outcome, report.longrepr = ("failed", "it must fail") if report.passed else ("passed", None)
    return report
"""
TURNED = """
@W
def test_turned_that_passes(rank): dist.barrier()

@W
def test_turned_that_fails(rank): assert rank == 3

@W
def test_passes(rank): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_hook_that_turns_outcomes_round_does_so_once(run, world, options):
    result = run(TURNED, "-rf", "-p", "no:randomly", *options, world=world, conftest=TURNS)
    result.assert_outcomes(passed=2, failed=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["it must fail", "FAILED *test_turned_that_passes*"])


RERUNS = """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):  # as plugins do that run failed tests again
    for _ in range(3):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if not any(report.failed for report in reports):
            break
        item._initrequest()
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""
FLAKY = """
@pytest.fixture(scope="session")
def runs():
    with open(f"runs{dist.get_rank() if dist.is_initialized() else 0}", "a+") as file:
        file.write("x")
        file.seek(0)
        yield len(file.read())

@W
def test_passes(runs): pass

@W
def test_the_last(runs): assert runs > 1
"""


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_the_last_test_may_run_again(run, world):
    run(FLAKY, "-p", "no:randomly", world=world, conftest=RERUNS).assert_outcomes(passed=2)
