"""What Hypothesis offers in the body of a property that runs on ranks."""

from __future__ import annotations

import pytest

import pdlcheck.harness.noted  # noqa: F401  # the inner runs forget the modules that they import

WORLDS = pytest.mark.parametrize("world", ["sim", "gloo"])
PROPERTY = """
import hypothesis
from hypothesis import assume, event, given, note, settings, strategies as st, target

FEW = settings(suppress_health_check=list(hypothesis.HealthCheck), max_examples=10, database=None, derandomize=True)
"""


@WORLDS
def test_a_falsifying_example_shows_the_parameters_of_all_ranks(run, world):
    source = """
@pytest.fixture
def doubled(request):
    return 2 * request.param

@W
@pytest.mark.parametrize("k", [3])
@pytest.mark.parametrize("doubled", [21], indirect=True)
@FEW
@given(n=st.integers(0, 5))
def test_property(rank, world_size, k, doubled, n):
    assert n < 0 and k == 3 and doubled == 42
"""
    result = run(PROPERTY + source, world=world)
    result.assert_outcomes(failed=1)
    own = "<each rank's own>"
    shown = [f"rank={own},", "world_size=2,", "k=3,", f"doubled={own},", "n=0,"]
    result.stdout.fnmatch_lines([f"*{line}" for line in shown])


@WORLDS
def test_notes_of_ranks_are_shown_with_the_falsifying_example_and_their_rank(run, world):
    source = """
@W
@FEW
@given(n=st.integers(0, 5))
def test_property(rank, n):
    note(f"{n} was drawn")
    dist.barrier()
    if rank == 1:
        note([n])
    assert n < 2
"""
    result = run(PROPERTY + source, world=world)
    result.assert_outcomes(failed=1)
    assert result.stdout.str().count("was drawn") == 1 + 2  # in the source, and of the smallest example alone
    result.stdout.fnmatch_lines(["*n=2,", "*rank 0: 2 was drawn", "*rank 1: 2 was drawn", "*rank 1: [[]2]"])


@WORLDS
def test_events_and_targets_of_ranks_are_those_of_the_example(run, world):
    source = """
@W
@FEW
@given(n=st.integers(0, 5))
def test_alike(n):
    event("drawn", n >= 0)
    target(n, label="n")

@W
@FEW
@given(n=st.integers(5, 5))
def test_own(rank, n):
    event(f"on {rank}")
    target(n + rank)

@W
@FEW
@given(n=st.integers(0, 5))
def test_assumes(rank, n):
    assume(n % 2)
    assert n % 2

@W
@FEW
@given(n=st.integers(0, 5))
def test_rejects(rank, n):
    n % 2 or hypothesis.reject()
"""
    result = run(PROPERTY + source, "--hypothesis-show-statistics", "-W", "error", world=world)
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*Highest target score: 5  (label='n')", "*100.00%, on 0", "*100.00%, on 1"])
    result.stdout.fnmatch_lines_random(["*5  (label='[[]rank 0]')", "*6  (label='[[]rank 1]')"])


@WORLDS
@pytest.mark.parametrize(("strategy", "cure"), [("data", "with @st.composite"), ("randoms", "random.Random(seed)")])
def test_what_draws_while_the_test_runs_is_refused_with_the_cure(run, world, strategy, cure):
    source = f"""
@W
@FEW
@given(drawing=st.{strategy}())
def test_property(rank, drawing):
    dist.barrier()
"""
    result = run(PROPERTY + source, world=world)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*InvalidArgument: argument 'drawing' comes from st.{strategy}(), *{cure}"])
