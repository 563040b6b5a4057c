"""Methods of a ``unittest.TestCase`` on ranks: each rank does everything that ``TestCase.run`` does around a method."""

from __future__ import annotations

import pytest

from ..conftest import HEAD
from ..needs_mpi import needs_mpi

WORLDS = ["sim", "gloo", pytest.param("mpi", marks=needs_mpi)]
IMPORT = "import unittest\n"


@pytest.fixture(params=WORLDS)
def outcomes(request, run):
    """Return a function that runs a file on one world and returns its result."""
    return lambda source, *options: run(IMPORT + source, *options, world=request.param)


def test_each_rank_sets_up_runs_and_cleans_up_in_the_order_of_unittest(outcomes):
    source = """
@pytest.fixture
def told(monkeypatch):
    monkeypatch.setenv("TOLD", "by a fixture of the module")

pytestmark = pytest.mark.usefixtures("told")

@W
class TestSum(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.steps = ["setUpClass"]

    @pytest.fixture(autouse=True)
    def take(self, rank, shared_tmp_path):
        self.rank, self.folder = rank, shared_tmp_path
        yield
        (self.folder / str(rank)).write_text(" ".join(self.life))
        assert self.life == ["setUp", "test", "tearDown", "second", "first"]

    def setUp(self):
        assert os.environ["TOLD"]
        self.life = ["setUp"]
        self.addCleanup(self.life.append, "first")
        self.x = torch.tensor([self.rank + 1.0])
        dist.all_reduce(self.x)

    def tearDown(self):
        self.life.append("tearDown")

    def test_sum(self):
        self.assertEqual(self.steps, ["setUpClass"])
        self.assertEqual(self._testMethodName, "test_sum")
        self.assertTrue(self.id().endswith("TestSum.test_sum"))
        self.addCleanup(self.life.append, "second")
        self.life.append("test")
        self.assertEqual(self.x.item(), 3)
"""
    outcomes(source).assert_outcomes(passed=1)


def test_an_assertion_is_told_with_its_rank_and_without_the_frames_of_unittest(outcomes):
    source = """
@W
class TestWrong(unittest.TestCase):
    def setUp(self):
        self.wanted = 3 + dist.get_rank()

    def test_wrong(self):
        x = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(x)
        self.assertEqual(x.item(), self.wanted)
"""
    result = outcomes(source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*>*self.assertEqual(x.item(), self.wanted)", "*AssertionError: 3.0 != 4"])
    result.stdout.fnmatch_lines(["*rank 1 of 2 raised this; last operation all_reduce(SUM)*"])
    result.stdout.no_fnmatch_line("*_baseAssertEqual*")


def test_skips_and_expected_failures_are_what_they_are_on_one_rank(outcomes):
    source = """
@W
class TestSome(unittest.TestCase):
    def setUp(self):
        assert not self.id().endswith("test_skipped")
        if self.id().endswith("in_set_up"):
            self.skipTest("in the set-up")

    @unittest.skip("the method")
    def test_skipped(self):
        assert False

    def test_skips_itself(self):
        if dist.get_rank() == 1:
            self.skipTest("on rank 1")

    def test_skipped_in_set_up(self):
        assert False

    @unittest.expectedFailure
    def test_fails_as_expected(self):
        self.assertEqual(dist.get_rank(), 1)

    @unittest.expectedFailure
    def test_passes_unexpectedly(self):
        self.assertEqual(dist.get_world_size(), 2)

@unittest.skip("the class")
@W
class TestSkipped(unittest.TestCase):
    def test_skipped_with_its_class(self):
        assert False

@W
class TestSkipsInItsClass(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise unittest.SkipTest("in the set-up of the class")

    def test_skipped_by_its_class(self):
        assert False
"""
    result = outcomes(source, "-rsxf")
    result.assert_outcomes(skipped=5, xfailed=1, failed=1)
    for reason in ["the method", "on rank 1", "in the set-up", "the class", "in the set-up of the class"]:
        result.stdout.fnmatch_lines([f"SKIPPED*{reason}"])
    result.stdout.fnmatch_lines(["*XPASS(strict)*", "FAILED *test_passes_unexpectedly*"])


def test_errors_before_and_after_a_method_name_their_rank(outcomes):
    source = """
@W
class TestBad(unittest.TestCase):
    def setUp(self):
        self.addCleanup(self.clean_up)
        if dist.get_rank() == 1 and self.id().endswith("set_up"):
            raise ValueError("no set-up")

    def tearDown(self):
        if dist.get_rank() == 0 and self.id().endswith("tear_down"):
            raise ValueError("no tear-down")

    def clean_up(self):
        print("cleaned up", dist.get_rank())
        if self.id().endswith("clean_up"):
            raise ValueError("no clean-up")

    def test_set_up(self): ...
    def test_tear_down(self): ...
    def test_clean_up(self): ...
"""
    result = outcomes(source, "-k", "set_up")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*ValueError: no set-up", "*rank 1 of 2 raised this*", "*cleaned up 1"])
    result = outcomes(source, "-k", "tear_down")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*ValueError: no tear-down", "*rank 0 of 2 raised this*", "*cleaned up 0"])
    result = outcomes(source, "-k", "clean_up")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*ValueError: no clean-up", "*ranks 0, 1 of 2 raised this*"])


def test_a_subtest_tells_its_parameters(outcomes):
    pytest.importorskip("_pytest.subtests", reason="pytest < 9 has no subtests")
    source = """
@W
class TestEach(unittest.TestCase):
    def test_each(self):
        for number in range(3):
            with self.subTest("of one", number=number):
                self.assertNotEqual((dist.get_rank(), number), (1, 2))
"""
    result = outcomes(source)
    assert result.parseoutcomes()["failed"] == 2  # the subtest, and the test that contains it
    result.stdout.fnmatch_lines(["SUBFAILED*of one*number=*2*test_each*"])


def test_several_world_sizes_and_methods_without_ranks_in_one_class(outcomes):
    source = """
class TestSome(unittest.TestCase):
    def setUp(self):
        self.here = dist.is_initialized()

    def test_plain(self):
        self.assertFalse(self.here)

    @pytest.mark.world_size(2, 3)
    def test_on_ranks(self):
        self.assertTrue(self.here)

    @pytest.mark.parametrize("number", [1, 2])
    @W
    def test_with_parameters(self, number, world_size):
        self.assertEqual(world_size, 2)

class TestDerived(TestSome):
    def runTest(self): ...
"""
    result = outcomes(source, "-v")
    result.assert_outcomes(passed=10)
    for size in [2, 3]:
        result.stdout.fnmatch_lines([f"*TestSome::test_on_ranks[[]*-{size}]*"])


def test_what_decorators_do_to_methods(outcomes):
    source = """
from functools import wraps
from hypothesis import given, settings, strategies as st
from unittest import mock
from torch.testing._internal import common_utils

def with_answer(method):
    @wraps(method)
    def called(self):
        return method(self, 42)
    return called

@W
class TestDecorated(unittest.TestCase):
    @with_answer
    def test_an_argument_of_the_decorator(self, answer):
        self.assertEqual(answer, 42)

    @mock.patch("os.getlogin")
    def test_a_mock(self, getlogin):
        getlogin.return_value = dist.get_rank()
        dist.barrier()
        self.assertEqual(os.getlogin(), dist.get_rank())

    @given(count=st.integers(1, 5))
    @settings(max_examples=5)
    def test_a_property(self, count):
        x = torch.ones(count)
        dist.all_reduce(x)
        self.assertEqual(x.sum().item(), 2 * count)

@W
class TestTorch(common_utils.TestCase):
    @common_utils.parametrize("count", [1, 2])
    def test_parameters_of_torch(self, count):
        x = torch.ones(count)
        dist.all_reduce(x)
        self.assertEqual(x, torch.full((count,), 2.0))

common_utils.instantiate_parametrized_tests(TestTorch)
"""
    outcomes(source).assert_outcomes(passed=5)


def test_no_async_method_passes_without_having_run(outcomes):
    source = """
@W
class TestAsync(unittest.IsolatedAsyncioTestCase):
    async def test_awaits(self):
        assert False
"""
    result = outcomes(source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*the body of an async test cannot run on *ranks; write a plain function*"])


def test_test_cases_without_ranks_are_collected_by_pytest_alone(pytester):
    pytester.makepyfile(HEAD + IMPORT + "class TestPlain(unittest.TestCase):\n    def test_a(self): ...\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--collect-only")
    result.stdout.fnmatch_lines(["*<UnitTestCase TestPlain>"])
