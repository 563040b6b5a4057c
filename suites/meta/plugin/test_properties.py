"""Properties on ranks: the controller draws the examples, and Hypothesis' functions work in their bodies."""

from __future__ import annotations

import pytest

import pdlcheck.harness.reporting.hypothesis_notes  # noqa: F401  # inner runs forget the modules that they import

WORLDS = pytest.mark.parametrize("world", ["sim", "gloo"])
PROPERTY = """
import hypothesis
from hypothesis import assume, event, given, note, settings, strategies as st, target

FEW = settings(suppress_health_check=list(hypothesis.HealthCheck), max_examples=10, database=None, derandomize=True)
"""


@WORLDS
def test_a_property_is_drawn_and_shrunk_in_the_controller(run, world):
    result = run(
        PROPERTY
        + """
@pytest.mark.world_size(2)
@settings(database=None, derandomize=True, deadline=None, max_examples=60)
@given(n=st.integers(0, 1000))
def test_property(rank, n):
    x = torch.tensor([n])
    dist.all_reduce(x)
    assert x.item() == 2 * n
    assert n < 17 or rank == 0
""",
        world=world,
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*rank 1 of 2 raised this*", "*n=17*"])


@WORLDS
def test_the_world_fixture_runs_functions_under_given(run, world):
    result = run(
        PROPERTY
        + """
def total(n):
    x = torch.tensor([n * dist.get_rank()])
    dist.all_reduce(x)
    return x.item()

@settings(database=None, deadline=None, max_examples=10)
@given(n=st.integers(-5, 5))
def test_total(world, n):
    assert world.run(total, n, world_size=3) == [3 * n] * 3
""",
        "-v",
        world=world,
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"*::test_total?{world}? PASSED*"])


@WORLDS
def test_a_property_may_be_a_method(run, world):
    result = run(
        PROPERTY
        + """
few = settings(database=None, max_examples=5, deadline=None)

class TestProperties:
    greeting = "hello"

    @pytest.mark.world_size(2, 3)
    @few
    @given(n=st.integers(0, 9))
    def test_marked_last(self, rank, n):
        assert 0 <= n <= 9 and self.greeting == "hello"

    @few
    @given(n=st.integers(0, 9))
    @pytest.mark.world_size(2)
    def test_marked_first(this, rank, n):
        assert this.greeting == "hello"

    @staticmethod
    @pytest.mark.world_size(2)
    @few
    @given(n=st.integers(0, 9))
    def test_static(rank, n):
        assert 0 <= n <= 9
""",
        world=world,
    )
    result.assert_outcomes(passed=4)


def test_a_property_that_is_a_method_runs_in_several_worlds(run):
    run(
        PROPERTY
        + """
class TestProperties:
    @settings(database=None, max_examples=5, deadline=None)
    @given(n=st.integers(0, 9))
    def test_world(self, world, n):
        assert world.run(max, n, 0, world_size=2) == [n, n]
""",
        world="sim,gloo",
    ).assert_outcomes(passed=2)


@WORLDS
def test_a_function_scoped_fixture_of_the_users_is_refused_by_name_unless_it_is_wanted(run, world):
    source = (
        PROPERTY
        + """
from hypothesis import HealthCheck

@pytest.mark.world_size(2, 3)
@settings(database=None, max_examples=5, deadline=None, suppress_health_check=[%s])
@given(n=st.integers(0, 9))
def test_folder(rank, tmp_path, n):
    assert tmp_path.exists()
"""
    )
    result = run(source % "", world=world)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*FailedHealthCheck: *uses a function-scoped fixture 'tmp_path'*"])
    run(source % "HealthCheck.function_scoped_fixture", world=world).assert_outcomes(passed=2)


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
    told = result.stdout.str().partition("= short test summary info =")[0]
    assert told.count("was drawn") == 1 + 2  # once in the source, and on each rank for the smallest example only
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


@WORLDS
def test_a_drawn_argument_that_cannot_be_sent_is_named(run, world):
    result = run(
        PROPERTY
        + """
import threading

@W
@FEW
@given(n=st.integers(), lock=st.builds(threading.Lock))
def test_lock(n, rank, lock):
    assert not lock.locked()
""",
        world=world,
    )
    result.assert_outcomes(failed=1)
    words = "TypeError: argument 'lock' of the test cannot be sent to the ranks: lock is a lock: TypeError: *"
    result.stdout.fnmatch_lines([f"E * {words}"])


SLOW = """
import time
from datetime import timedelta
from hypothesis import HealthCheck, given, settings, strategies as st

settings.load_profile("default")  # not that of a machine for continuous integration, which has no deadline
SLOW_S = 0.25  # longer than Hypothesis's default deadline

def slow(n):
    time.sleep(SLOW_S)
    return n

class TestMethods:
    @pytest.mark.world_size(2)
    @settings(max_examples=2, database=None)
    @given(n=st.integers(0, 1))
    def test_on_ranks(self, rank, n):
        slow(n)

    @settings(max_examples=2, database=None)
    @given(n=st.integers(0, 1))
    def test_world(self, world, n):
        assert world.run(slow, n, world_size=2) == [n, n]

@pytest.mark.world_size(2)
@settings(max_examples=2, database=None)
@given(n=st.integers(0, 1))
def test_on_ranks(rank, n):
    slow(n)

@pytest.fixture
def cluster(world):
    return world

@settings(max_examples=2, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n=st.integers(0, 1))
def test_a_fixture_of_mine_that_asks_for_the_world(cluster, n):
    assert cluster.run(slow, n, world_size=2) == [n, n]
"""


@pytest.mark.slow
@WORLDS
def test_the_default_deadline_of_hypothesis_does_not_count_on_ranks(run, world):
    run(SLOW, world=world, new_process=True).assert_outcomes(passed=4)


OWN_DEADLINES = (
    SLOW.partition("class TestMethods")[0]
    + """
settings.register_profile("mine", deadline=100, max_examples=2, database=None)

@pytest.mark.world_size(2)
@settings(max_examples=2, database=None, deadline=100)
@given(n=st.integers(0, 1))
def test_on_ranks(rank, n):
    slow(n)

@settings(max_examples=2, database=None, deadline=timedelta(seconds=60))
@given(n=st.integers(0, 1))
def test_long(world, n):
    world.run(slow, n, world_size=2)

@settings(settings.get_profile("mine"))
@given(n=st.integers(0, 1))
def test_profile(world, n):
    world.run(slow, n, world_size=2)

@settings(max_examples=2, database=None)
@given(n=st.integers(0, 1))
def test_without_ranks(n):
    slow(n)
"""
)


@pytest.mark.slow
@WORLDS
def test_a_deadline_that_the_user_sets_counts_and_so_does_the_default_of_tests_without_ranks(run, world):
    result = run(OWN_DEADLINES, "-v", world=world, new_process=True)
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines_random(["*::test_long* PASSED*", "*exceeds the deadline of 100.00ms*"])
    result.stdout.fnmatch_lines(["*exceeds the deadline of 200.00ms*"])
