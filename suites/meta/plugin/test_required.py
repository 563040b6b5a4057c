"""Options for CI: a missing requirement is a failure, and the last lines state which tests ran in which world."""

from __future__ import annotations

import pytest
import torch

SOURCE = """
@W
def test_on_ranks(rank): pass

def test_calls(world): assert world.run(dist.get_rank, world_size=2) == [0, 1]

@W
@pytest.mark.gpu
def test_cuda(rank): pass

@W
def test_skips(rank): pytest.skip("not today")

@W
@pytest.mark.xfail
def test_expected(rank): raise ValueError

def test_plain(): pass
"""
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")


@no_cuda
def test_what_is_missing_is_skipped_and_counted(run):
    result = run(SOURCE, world="sim,nccl")
    result.assert_outcomes(passed=3, skipped=7, xfailed=1)
    result.stdout.fnmatch_lines("pdlcheck: tests that ran on ranks: 3 on sim (2 not run), 0 on nccl (5 not run)")


@no_cuda
def test_what_is_missing_fails_where_an_option_says_so(run):
    result = run(SOURCE, "--no-skip-worlds", "--require-gpu", world="sim,nccl")
    result.assert_outcomes(passed=3, skipped=1, xfailed=1, errors=6)
    lines = "needs CUDA: * (--require-gpu)", "this torch has no backend 'nccl'; * (--no-skip-worlds)"
    for line in lines:
        result.stdout.fnmatch_lines(line)
    result.stdout.no_fnmatch_line("*worlds differ*")


@no_cuda
def test_a_world_that_is_there_is_not_asked_for_a_gpu(run):
    result = run("@W\ndef test_on_ranks(rank): pass\n", "--pdl-no-skip-worlds", "--pdl-require-gpu")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines("pdlcheck: tests that ran on ranks: 1 on gloo")


@pytest.mark.slow
def test_workers_of_xdist_are_counted(run):
    result = run(SOURCE, "-n", "2", "-k", "on_ranks or plain", world="sim", new_process=True)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines("pdlcheck: tests that ran on ranks: 1 on sim")


def test_a_session_without_ranks_has_no_such_line(run):
    result = run("def test_plain(): pass\n", world="sim")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("pdlcheck: *")


def test_a_marker_without_effect_is_a_warning(run):
    source = '@pytest.mark.isolation("fresh")\n@pytest.mark.gpu\ndef test_plain(): pass\n'
    result = run(source, "-W", "default::pytest.PytestUnknownMarkWarning", world="sim")
    result.assert_outcomes(passed=1, warnings=2)
    result.stdout.fnmatch_lines("*the marker isolation has no effect on a test without ranks: mark the test world_*")
    result.stdout.fnmatch_lines("*the marker gpu skips tests with ranks; for this one too, set*pdlcheck_markers = gpu")


@no_cuda
def test_an_ini_value_makes_the_marker_gpu_ours(run, pytester):
    pytester.makeini("[pytest]\npdlcheck_markers = gpu\nmarkers =\n    gpu: needs one\n")
    run("@pytest.mark.gpu\ndef test_plain(): pass\n", world="sim").assert_outcomes(skipped=1)


@pytest.mark.slow
def test_a_registered_marker_world_size_is_ours_where_worlds_are_named_or_fixtures_used(pytester):
    pytester.makeini("[pytest]\nmarkers =\n    world_size(n): mine\n")
    pytester.makepyfile(
        """
import pytest
RAN = []
@pytest.mark.world_size(2)
def test_without(): pass
@pytest.mark.world_size(2)
def test_with(rank): pass
"""
    )
    options = ("-p", "no:cacheprovider", "-p", "no:randomly", "-v")
    result = pytester.runpytest_subprocess(*options)
    result.stdout.fnmatch_lines(["*::test_without PASSED*", "*::test_with[[]sim-2[]] PASSED*"])
    result = pytester.runpytest_subprocess(*options, "--world", "sim")
    result.stdout.fnmatch_lines(["*::test_without[[]sim-2[]] PASSED*", "*::test_with[[]sim-2[]] PASSED*"])
