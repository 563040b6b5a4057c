"""The marker ``faults``, seen from outside."""

from __future__ import annotations

import pytest

# Inner runs forget the modules that they import, so modules with state must be imported before.
import pdlcheck.faults
import pdlcheck.item_runners.processes.items
import pdlcheck.item_runners.simulated.items  # noqa: F401

HEAD = """
import pytest, torch, torch.distributed as dist
from hypothesis import given, settings, strategies as st
from pdlcheck.errors import RankDied
from pdlcheck.faults import Absent, Corrupt, Kill, Slow, Stall

def total():
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()

def survive(words):
    total()
    with pytest.raises(RuntimeError, match=words):
        total()
"""


@pytest.fixture
def run(pytester):
    def run(source, *options, world="sim"):
        pytester.makepyfile(HEAD + source)
        return pytester.runpytest_inprocess(
            "--world", world, "-p", "no:cacheprovider", "-p", "no:randomly", "--strict-markers", *options
        )

    return run


BODY = """
@pytest.mark.faults(Kill(1, 1))
@pytest.mark.world_size(2)
def test_kill(rank):
    survive("Connection closed by peer .rank 1.")

@pytest.mark.faults(Stall(1, 1))
@pytest.mark.world_size(2)
def test_stall(rank):
    survive("Timed out waiting")

@pytest.mark.faults(Corrupt(1, 1, "stale"))
@pytest.mark.world_size(2)
def test_corrupt(rank):
    assert [total(), total()] == [2.0, 1.0 if rank == 1 else 2.0]

@pytest.mark.faults(Absent(1))
@pytest.mark.world_size(2)
def test_absent(rank, group):
    assert dist.get_world_size(group) == 2  # it was there before the body
    with pytest.raises(dist.DistStoreError, match="1/2 clients joined"):
        dist.init_process_group("gloo")

@pytest.mark.world_size(2)
def test_without(rank):
    assert [total(), total()] == [2.0, 2.0]
"""


def test_bodies_that_survive_pass_and_the_next_test_is_well(run):
    run(BODY).assert_outcomes(passed=5)


def test_an_unhandled_fault_fails_and_names_the_rank(run):
    result = run("""
@pytest.mark.faults(Stall(1, 1))
@pytest.mark.world_size(3)
def test_body():
    total(), total()

@pytest.mark.faults(Absent(1))
@pytest.mark.world_size(2)
def test_absent():
    total()
""")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*rank 1 was stalled by a fault*collective 1*", "*ranks 0, 2 gave up waiting*"])
    result.stdout.fnmatch_lines(["*rank 1 never came*", "*rank 0 gave up waiting*1/2 clients joined*"])


def test_set_up_and_tear_down_suffer_nothing_and_do_not_count(run):
    source = """
events = []

@pytest.fixture
def warm(rank):
    for _ in range(3):
        total()
    events.append("up")
    yield
    for _ in range(3):
        total()
    events.append("down")

@pytest.mark.faults(Corrupt(0, 1, "nan"))
@pytest.mark.world_size(1)
def test_body(warm):
    assert total() == 1.0
    assert total() != 1.0

@pytest.mark.faults(Kill(0, 1))
@pytest.mark.world_size(1)
def test_kill(warm):
    total(), total()
    events.append("alive")

def test_both_were_torn_down():
    assert events == ["up", "down"] * 2
"""
    run(source).assert_outcomes(passed=3)


def test_under_schedules_and_for_each_example(run):
    source = """
@pytest.mark.schedules(5)
@pytest.mark.faults(Stall(1, 1))
@pytest.mark.world_size(3)
def test_schedules(tmp_path):
    assert list(tmp_path.iterdir()) == []
    survive("Timed out waiting")

@pytest.mark.schedules("all")
@pytest.mark.faults(Absent(1))
@pytest.mark.world_size(3)
def test_all_schedules():
    with pytest.raises(dist.DistStoreError):
        total()

@pytest.mark.faults(Kill(1, 1))
@pytest.mark.world_size(2)
@settings(max_examples=5, database=None, deadline=None)
@given(number=st.integers(0, 9))
def test_property(number):
    survive("Connection closed")
"""
    run(source).assert_outcomes(passed=3)


def test_with_the_fixture_world_each_run_suffers(run):
    source = """
@pytest.fixture
def before(world):
    assert world.run(total, world_size=2) == [2.0, 2.0]
    yield
    assert world.run(total, world_size=2) == [2.0, 2.0]

@pytest.mark.faults(Corrupt(1, 0, "stale"))
def test_world(world, before):
    for _ in range(2):
        assert world.run(total, world_size=2) == [2.0, 1.0]

@pytest.mark.faults(Kill(1, 0))
def test_rank_out_of_range(world):
    with pytest.raises(ValueError, match="rank 1 of 1"):
        world.run(total, world_size=1)
    with pytest.raises(RankDied):
        world.run(total, world_size=2)

def test_without(world):
    assert world.run(total, world_size=2) == [2.0, 2.0]
"""
    run(source).assert_outcomes(passed=3)


def test_a_fault_that_does_not_come_about_is_no_pass(run):
    result = run("""
@pytest.mark.faults(Kill(1, 3))
@pytest.mark.world_size(2)
def test_body():
    total()
""")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*Inconclusive: Kill(rank=1, operation=3) did not come about: *fewer operations*"])


def test_elsewhere_the_test_is_skipped_with_the_reason(run):
    source = """
@pytest.mark.faults(Kill(1, 1))
@pytest.mark.world_size(2)
def test_body():
    total()

@pytest.mark.faults(Kill(1, 1))
def test_world(world):
    raise AssertionError
"""
    result = run(source, "-rs", world="gloo")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["*faults are injected on the world sim alone, not on gloo*"])


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("faults(Kill(2, 1))", "*faults: Kill(rank=2, operation=1) is about rank 2 of 2; name a rank from 0 to 1*"),
        ("faults('kill')", "*faults must be Absent, Corrupt, Kill, Slow and Stall of pdlcheck.faults; got 'kill'*"),
        ("faults()", "*faults takes faults by position, such as Kill(1, 3); got none*"),
        ("faults(Slow(1, 2.0))", '*Slow(rank=1, factor=2.0) shows in times alone*get_world("sim", topology=Topology(*'),
        ("faults(kill=1)", "*faults takes faults by position, such as Kill(1, 3); got kill=1*"),
    ],
)
def test_arguments_that_cannot_be_meant_are_named(run, marker, message):
    result = run(f"""
@pytest.mark.{marker}
@pytest.mark.world_size(2)
def test_body():
    total()
""")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([message])


def test_a_test_without_ranks_has_none_to_suffer(run):
    result = run("""
@pytest.mark.faults(Kill(1, 1))
def test_plain():
    pass
""")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*faults happen to ranks: mark the test world_size, or let it use the fixture world*"])


def test_a_test_that_runs_nothing_is_no_pass(run):
    source = """
@pytest.fixture
def before(world):
    world.run(total, world_size=2)

@pytest.mark.faults(Kill(1, 1))
def test_world(world, before):
    pass

@pytest.mark.faults(Corrupt(1, 0))
def test_that_runs_one(world, before):
    world.run(total, world_size=2)

@pytest.mark.faults(Kill(1, 1))
def test_own_failure(world):
    raise KeyError("mine")

@pytest.mark.faults(Kill(1, 1))
def test_skip(world):
    pytest.skip("not today")
"""
    result = run(source)
    result.assert_outcomes(passed=1, failed=2, skipped=1)
    result.stdout.fnmatch_lines(["*the test is marked faults and ran nothing on its world*", "*KeyError: 'mine'*"])


def test_drawn_faults_reach_the_ranks_and_shrink(run):
    source = """
from pdlcheck.strategies import faults

QUICK = settings(max_examples=40, database=None, deadline=None, derandomize=True)

@pytest.mark.world_size(3)
@QUICK
@given(drawn=faults(world_size=3, operations=2, kinds=[Kill, Stall]))
def test_body(rank, drawn):
    total()
    try:
        total()
    except RuntimeError as error:
        assert drawn and str(error).startswith("[sim] ")

@pytest.mark.world_size(3)
@QUICK
@given(drawn=faults(world_size=3, operations=4, kinds=[Kill]))
def test_survivor(drawn):
    for _ in range(2):
        try:
            total()
        except RuntimeError as error:
            assert drawn[0].rank in range(3) and "Connection closed" in str(error)
            return

@QUICK
@given(drawn=faults(world_size=2, operations=2))
def test_world(world, drawn):
    world.faults = drawn
    try:
        world.run(total, world_size=2)
    finally:
        world.faults = ()
"""
    result = run(source)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*rank 0 was killed by a fault*collective 0*", "*drawn=?Kill(rank=0, operation=0)?*"])
