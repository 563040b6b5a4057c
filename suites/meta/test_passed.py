"""Hooks of a rank's session that look at reports see those of phases that passed; where there is none, none is made."""

from __future__ import annotations

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
