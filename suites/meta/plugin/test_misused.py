"""Invalid tests that a newcomer may write: each is an error that names the argument, its value and the cure."""

from __future__ import annotations

import pytest

WORLDS = pytest.mark.parametrize("world", ["sim", "gloo"])
PARAMETERS = """
@pytest.mark.parametrize("world_size", [2, 3])
def test_no_ranks(rank, world_size):
    assert dist.get_world_size() == world_size

@W
@pytest.mark.parametrize("world_size", [2, 3], indirect=True)
def test_indirect(rank, world_size):
    pass

@W
@pytest.mark.parametrize("world_size", [2, 3])
def test_direct(rank, world_size):
    pass

@W
@pytest.mark.parametrize("rank", [0, 1])
def test_rank(rank):
    pass

@W
@pytest.mark.parametrize("rank", [8, "full"])
def test_of_a_matrix(rank, world_size):
    assert rank in (8, "full") and world_size == 2
"""
CURE = "@pytest.mark.world_size(3); give an argument of your own another name"


@WORLDS
def test_numbers_of_ranks_are_not_parametrized(run, world):
    result = run(PARAMETERS, world=world)
    result.assert_outcomes(passed=4, errors=6)
    of_size = "its argument 'world_size' is 3 and it runs on 2 ranks: how many is for the marker to say, such as"
    lines = [
        "*test_no_ranks?2?: parametrize gives its argument 'world_size' the value 2 and the test no ranks: write "
        "@pytest.mark.world_size(2) in its place, which takes several sizes",
        f"*test_indirect?{world}-2-3?: {of_size} {CURE}",
        f"*test_direct?{world}-2-3?: {of_size} {CURE}",
        f"*test_rank?{world}-2-0?: its argument 'rank' is 0 on every rank: each rank runs the test, and the fixture "
        "'rank' of pdlcheck says which it is; take that one, or give an argument of your own another name",
    ]
    for line in lines:
        result.stdout.fnmatch_lines([line])


@WORLDS
def test_fixtures_of_ones_own_in_the_place_of_ours_say_the_same(run, world):
    result = run(
        """
@pytest.fixture
def world_size():
    return 3

class TestRight:
    @pytest.fixture
    def world_size(self):
        return dist.get_world_size()

    @pytest.fixture
    def rank(self):
        return dist.get_rank()

    @pytest.fixture
    def device(self):
        return "cpu"

    @W
    def test_same(self, world_size, rank, device):
        assert (world_size, rank, device) == (2, dist.get_rank(), "cpu")

class TestRank(TestRight):
    @pytest.fixture
    def rank(self):
        return 0

    test_same = None

    @W
    def test_on_rank_1(self, world_size, rank):
        pass

@W
def test_wrong(world_size):
    pass
""",
        world=world,
    )
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(
        [f"*test_wrong?{world}-2?: its argument 'world_size' is 3 and it runs on 2 ranks: *{CURE}"]
    )
    result.stdout.fnmatch_lines([f"*test_on_rank_1?{world}-2?: its argument 'rank' is 0 on rank 1: each rank runs *"])


def test_single_processes_may_have_such_arguments_for_themselves(run):
    run(
        """
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("rank", [0, 5])
def test_plain(rank, world_size):
    assert rank in (0, 5) and world_size in (1, 2)

@pytest.mark.parametrize("world_size", [1, 2])
def test_called(world, world_size):
    assert len(world.run(dist.get_rank, world_size=world_size)) == world_size
""",
        world="sim",
    ).assert_outcomes(passed=6)


@WORLDS
def test_wrong_arguments_of_markers_are_named_in_every_world(run, world):
    result = run(
        """
pytestmark = W

@pytest.mark.isolation(mode="fresh")
def test_isolation(rank): pass

@pytest.mark.schedules(count=3)
def test_schedules(rank): pass

@pytest.mark.schedules("al")
def test_how_many(rank): pass

@pytest.mark.semantics("ncl")
def test_semantics(rank): pass
""",
        world=world,
    )
    result.assert_outcomes(errors=4)
    text = result.stdout.str()
    for words in (
        "isolation takes one of pool, reinit, fresh, such as isolation('fresh'); got mode='fresh'",
        'schedules takes a number of schedules, such as schedules(50), or "all" with at_most=N; got count=3',
        "schedules takes a number of schedules, such as schedules(50), or \"all\" with at_most=N; got 'al'",
        "semantics must be one of buffered, gloo, nccl, rendezvous; got 'ncl'",
    ):
        assert f"-2]: {words}" in text
    assert "another exception occurred" not in text


def test_markers_about_ranks_have_no_effect_without_ranks_and_are_warned_of(run):
    result = run(
        """
@pytest.mark.schedules(5)
def test_schedules(): pass

@pytest.mark.isolation("fresh")
def test_isolation(): pass

@pytest.mark.semantics("nccl")
class TestSome:
    def test_of_a_class_that_has_others_too(self): pass

    def test_ranks(self, world): world.run(dist.get_rank, world_size=2)
""",
        *("-W", "default::pytest.PytestUnknownMarkWarning"),
        world="sim",
    )
    result.assert_outcomes(passed=4, warnings=2)
    cure = "has no effect on a test without ranks: mark the test world_size, too, or use the fixture world"
    for marker in ("schedules", "isolation"):
        result.stdout.fnmatch_lines(f"*::test_{marker}: the marker {marker} {cure}")


@pytest.mark.parametrize(
    ("marker", "got"),
    [
        ("world_size(size=2)", "size=2"),
        ("world_size", "none"),
        ("world_size(2, '4', 0)", "'4', 0"),
        ("world_size(2, 10**30)", f"{10**30}"),
    ],
    ids=["keyword", "none", "some", "many"],
)
def test_the_sizes_of_the_marker_are_numbers_by_position(run, marker, got):
    result = run(f"@pytest.mark.{marker}\ndef test_sizes(rank): pass", world="sim")
    result.assert_outcomes(errors=1)
    words = "world_size takes numbers of ranks from 1 to 10000, such as world_size(2, 4)"
    result.stdout.fnmatch_lines([f"*::test_sizes: {words}; got {got}"])


def test_a_timeout_is_a_number_of_seconds_without_its_plugin_too(run):
    result = run(
        """
@W
@pytest.mark.timeout("1 s")
def test_words(rank): pass

@W
@pytest.mark.timeout("30")
def test_number(rank): pass
""",
        "-p",
        "no:timeout",
        world="sim",
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*test_words?sim-2?: timeout takes seconds, such as timeout(30); got '1 s'"])


@WORLDS
def test_what_world_run_calls_is_a_function(run, world):
    result = run("def test_called(world): world.run(print('once'), world_size=2)", world=world)
    result.assert_outcomes(failed=1)
    cure = "pass it without calling it: world.run(fn, *args, world_size=2)"
    result.stdout.fnmatch_lines(
        [f"E * TypeError: world.run takes a function, which every rank calls, got None; {cure}"]
    )


def test_the_marker_for_tests_of_other_harnesses_has_their_number_of_ranks(run):
    result = run(
        """
class TestDeepSpeed:
    world_size = 4
    def test_sum(self): dist.barrier()

@pytest.mark.mpi(min_size=3)
def test_mpi(): dist.barrier()
""",
        "-W",
        "ignore::pytest.PytestUnknownMarkWarning",
        world="sim",
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        ["*or its class, @pytest.mark.world_size(4)", "*or its class, @pytest.mark.world_size(3)"]
    )


@pytest.mark.slow
@WORLDS
def test_a_test_case_that_starts_ranks_itself_is_not_marked(run, world):
    result = run(
        """
from torch.testing._internal.common_distributed import MultiProcContinuousTest, MultiProcessTestCase
from torch.testing._internal.common_utils import TestCase

@W
class TestProcesses(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_sum(self): pass

@W
class TestContinuous(MultiProcContinuousTest):
    def test_sum(self): pass

@W
class TestRight(TestCase):
    def test_sum(self): dist.barrier()
""",
        world=world,
        new_process=True,
    )
    result.assert_outcomes(passed=1, errors=2)
    cure = "leave world_size away, or derive from torch.testing._internal.common_utils.TestCase and take the fixture *"
    for name in ("MultiProcessTestCase", "MultiProcContinuousTest"):
        result.stdout.fnmatch_lines([f"*: {name} of torch starts ranks of its own, *: {cure}"])


def test_an_async_test_on_simulated_ranks_is_refused_in_one_line(run):
    result = run("@W\nasync def test_async(rank): pass", world="sim")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["the body of an async test cannot run on simulated ranks; write a plain function, *"])
    assert "traceback entries are hidden" not in result.stdout.str()
