"""Subclasses of a ``DistributedTest`` and a ``DistributedFixture``, whose base classes start processes themselves."""

from __future__ import annotations

import pytest

BASES = """
import os
from abc import ABC, abstractmethod

import pytest
import torch.distributed as dist


class Launcher(ABC):
    world_size = 2
    backend = "gloo"
    init_distributed = True
    requires_cuda_env = True
    reuse_dist_env = False

    @abstractmethod
    def run(self): ...

    def __call__(self, request):
        raise RuntimeError("the base class starts processes")
{dist_run}

class DistributedFixture(Launcher):
    is_dist_fixture = True


class DistributedTest(Launcher):
    is_dist_test = True

    @pytest.fixture(autouse=True, scope="class")
    def class_tmpdir(self, tmp_path_factory):
        return tmp_path_factory.mktemp(type(self).__name__)

    def run(self, **values):
        self._current_test(**values)


class Accelerator:
    def is_available(self):
        return True


def get_accelerator():
    return Accelerator()
"""
DIST_RUN = """
    def _dist_run(self, local_rank, num_procs, master_port, init_method, skipped=""):
        assert not dist.is_initialized()
        if self.init_distributed:
            dist.init_process_group(self.backend, init_method=init_method, rank=local_rank, world_size=num_procs)
        try:
            self.run(**self._fixture_kwargs)
        except pytest.skip.Exception as skip:
            skipped = skip.msg
        return skipped

    def _dist_destroy(self):
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
"""
TESTS = """
import os
from bases import DistributedFixture, DistributedTest


@pytest.fixture(params=[10, 20])
def value(request):
    return request.param


class written_on_four(DistributedFixture):
    world_size = 4

    def run(self, value, class_tmpdir):
        assert dist.get_world_size() == int(os.environ["WORLD_SIZE"]) == self.world_size
        total = torch.tensor([dist.get_rank()])
        dist.all_reduce(total)
        (class_tmpdir / f"{value}-{dist.get_rank()}").write_text(str(total.item()))


class TestOnTwo(DistributedTest):
    world_size = 2

    @pytest.fixture(params=[50])
    def own(self, request):
        return request.param

    def test_is_called_on_ranks(self, value, own, word="hello"):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert (total, own, word) == (2, 50, "hello")
        assert value in (10, 20)

    @pytest.mark.world_size(3)
    @pytest.mark.parametrize("other", [70, 80])
    def test_with_a_marker(self, other):
        assert dist.get_world_size() == int(os.environ["WORLD_SIZE"]) == 3

    @pytest.mark.world_size([1, 2])
    def test_with_several_sizes(self, class_tmpdir):
        with (class_tmpdir / "sizes").open("a") as file:
            file.write(str(dist.get_world_size()))
        if dist.get_world_size() == 2:
            dist.barrier()
            assert sorted((class_tmpdir / "sizes").read_text()) == ["1", "2", "2"]

    @pytest.mark.parametrize("world_size", [1, 3])
    def test_with_an_argument(self, world_size):
        assert dist.get_world_size() == world_size

    def test_skipped(self):
        pytest.skip("not today")

    def test_wrong_on_one_rank(self):
        assert dist.get_rank() == 0


class TestWithAFixtureOfFour(DistributedTest):
    world_size = 1

    def test_reads(self, written_on_four, value, class_tmpdir):
        assert dist.get_world_size() == 1
        assert [(class_tmpdir / f"{value}-{rank}").read_text() for rank in range(4)] == ["6"] * 4


class TestWithout(DistributedTest):
    init_distributed = False

    def test_no_group(self):
        assert not dist.is_initialized()
        assert os.environ["LOCAL_RANK"] in "01"
        with pytest.raises(ValueError, match="not been initialized"):
            dist.barrier()


class TestDeadlock(DistributedTest):
    def test_waits(self):
        if dist.get_rank() == 0:
            dist.recv(torch.ones(1), 1)


class TestPlain:
    def test_of_no_ranks(self):
        assert not dist.is_initialized()
"""
CONFTEST = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if getattr(item.cls, "is_dist_test", False):
        item.cls()(item._request)
        item.runtest = lambda: True
"""


@pytest.mark.parametrize("world", ["sim", "gloo"])
@pytest.mark.parametrize(
    ("dist_run", "conftest"), [("", ""), (DIST_RUN, ""), (DIST_RUN, CONFTEST)], ids=["plain", "own way", "hooks"]
)
def test_they_run_on_the_worlds_of_the_session_as_they_stand(run, world, dist_run, conftest):
    result = run(TESTS, world=world, bases=BASES.format(dist_run=dist_run), conftest=conftest)
    result.assert_outcomes(passed=2 + 2 + 1 + 2 + 2 + 1 + 1, failed=2, skipped=1)
    text = result.stdout.str()
    assert "Deadlock" in text
    assert "rank 1" in text
    assert "starts processes" not in text


def test_what_a_test_leaves_in_modules_is_gone_unless_a_marker_says_otherwise(run):
    result = run(
        """
from bases import DistributedTest

met = []

def meet():
    met.append(dist.distributed_c10d._get_default_group())
    assert len(met) == 1, "a group of an earlier test"

class TestNew(DistributedTest):
    reuse_dist_env = True

    @pytest.mark.parametrize("time", [1, 2])
    def test_meets(self, time): meet()

@pytest.mark.isolation("pool")
class TestKept(DistributedTest):
    @pytest.mark.parametrize("time", [1, 2])
    def test_meets(self, time): meet()
""",
        bases=BASES.format(dist_run=DIST_RUN),
    )
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*TestKept.test_meets*", "E*AssertionError: a group of an earlier test*"])


def test_both_worlds_in_one_session(run):
    result = run(TESTS, "-k", "marker or reads", "-v", world="sim,gloo", bases=BASES.format(dist_run=DIST_RUN))
    result.assert_outcomes(passed=2 * (2 + 2))
    result.stdout.fnmatch_lines(["*TestOnTwo::test_with_a_marker?gloo-70? PASSED*"])


def test_without_the_option_the_base_class_launches(pytester):
    pytester.makepyfile(
        bases=BASES.format(dist_run=""),
        conftest=CONFTEST,
        test_inner="from bases import DistributedTest\n\nclass TestIt(DistributedTest):\n    def test_it(self): ...\n",
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*RuntimeError: the base class starts processes"])


def test_a_class_that_only_has_the_name_is_left_alone(run):
    run(
        """
class DistributedTest:
    world_size = 2

    def __call__(self, other): ...

class TestIt(DistributedTest):
    def test_no_ranks(self):
        assert not dist.is_initialized()

    @W
    def test_on_ranks(self, rank):
        assert dist.get_rank() == rank
""",
        world="sim",
    ).assert_outcomes(passed=2)
