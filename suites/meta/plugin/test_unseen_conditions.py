"""The summary of a session names conditions that passed checks have not met; an ini value makes the session fail."""

from __future__ import annotations

import pytest

SOURCE = """
from pdlcheck.checks import check_all_reduce, check_metric
from pdlcheck.primitives import ring_all_reduce

def largest_error(errors):
    largest = errors[dist.get_rank() :: dist.get_world_size()].max()  # a rank without samples has none
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)

@pytest.mark.parametrize("size", [2, 3])
def test_metric(world, size): check_metric(largest_error, [torch.arange(6.0)], world, world_sizes=[size])

def test_again(world): check_metric(largest_error, [torch.arange(6.0)], world, world_sizes=[2])
"""
MISSING = "check_metric: not seen: a rank without samples (test_inner.py::test_metric)"
MORE = "check_metric: not seen: a rank without samples, more than two ranks (*_again)"


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_the_summary_names_what_no_case_of_a_function_has_met(run, options):
    result = run(SOURCE, "-p", "no:randomly", *options, world="sim")
    result.assert_outcomes(passed=3)
    assert result.ret == 0
    result.stdout.fnmatch_lines([MISSING, MORE])


def test_with_the_ini_value_such_a_session_fails(run):
    result = run(SOURCE, "-o", "pdlcheck_not_seen=fail", world="sim")
    result.assert_outcomes(passed=3)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines_random([MISSING, "pdlcheck_not_seen = fail: add cases that meet these conditions*"])


def test_a_condition_that_cannot_occur_is_accepted(run):
    accepted = "check_metric: a rank without samples\\ncheck_metric: more than two ranks".replace("\\n", "\n")
    result = run(SOURCE, "-o", "pdlcheck_not_seen=fail", "-o", f"pdlcheck_accept_unseen={accepted}", world="sim")
    assert result.ret == 0
    assert "not seen" not in result.stdout.str()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("pdlcheck_not_seen=strict", "*pdlcheck_not_seen must be one of report, fail, got 'strict'*"),
        ("pdlcheck_accept_unseen=a rank without samples", "*has a line for each condition, such as 'check_metric: *"),
    ],
)
def test_a_wrong_ini_value_is_named_with_the_right_ones(run, setting, words):
    result = run(SOURCE, "-o", setting, world="sim")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([words])


MANY = """
from pdlcheck.seen_conditions import publish
""" + "\n".join(f"def test_{i}(world): publish('check_{i}', {{'a rank': False}})" for i in range(10))


def test_many_lines_are_shortened_unless_all_are_wanted(run):
    short = run(MANY, world="sim")
    assert short.stdout.str().count("not seen: a rank") == 8
    short.stdout.fnmatch_lines(["... 2 more such lines with -v"])
    assert run(MANY, "-v", world="sim").stdout.str().count("not seen: a rank") == 10


def test_a_failed_test_reports_no_conditions(run):
    source = "from pdlcheck.seen_conditions import publish\n"
    result = run(f"{source}def test_fails(world): publish('check_a', {{'a rank': False}}); assert False", world="sim")
    result.assert_outcomes(failed=1)
    assert "not seen" not in result.stdout.str()
