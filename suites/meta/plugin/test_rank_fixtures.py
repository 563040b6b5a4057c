"""Fixtures in ranks: their set-up and tear-down, and their values in a body."""

from __future__ import annotations

import pytest

from pdlcheck.worlds.simulated import SimulatedRanks

from ..conftest import HEAD


def test_fixtures_of_every_scope_are_set_up_and_torn_down_when_pytest_does_it(pytester):
    package = pytester.mkpydir("package")
    (package / "conftest.py").write_text(
        """
import os, pytest, torch.distributed as dist

def tell(what):
    if dist.is_initialized():
        with open(os.path.join(os.path.dirname(__file__), f"log{dist.get_world_size()}-{dist.get_rank()}"), "a") as log:
            print(what, file=log)

def make(scope):
    @pytest.fixture(scope=scope, name=scope + "_thing")
    def thing():
        tell(f"+{scope}")
        yield scope
        tell(f"-{scope}")
    return thing

session_thing, package_thing, module_thing, class_thing, function_thing = map(
    make, ["session", "package", "module", "class", "function"])

@pytest.fixture(autouse=True)
def automatic(session_thing, package_thing):
    yield

@pytest.fixture(params=["a", "b"], scope="module")
def letter(request):
    tell(f"+{request.param}")
    yield request.param
    tell(f"-{request.param}")

def pytest_sessionfinish():
    tell("finish")
"""
    )
    (package / "test_one.py").write_text(
        """
import pytest
from package.conftest import tell

@pytest.mark.world_size(2)
class TestClass:
    def test_first(self, class_thing, function_thing): tell("first")
    def test_second(self, class_thing): tell("second")

@pytest.mark.world_size(2)
def test_letter(module_thing, letter): tell(letter)
"""
    )
    (package / "test_two.py").write_text(
        """
import pytest
from package.conftest import tell

@pytest.mark.world_size(3)
def test_on_three(): tell("three")

@pytest.mark.world_size(2)
def test_last(module_thing): tell("last")

@pytest.mark.world_size(2)
@pytest.mark.parametrize("x", [1, 2], ids=["one", "two"])
def test_ids(x, request): assert request.node.name == f"test_ids[gloo-2-{['one', 'two'][x - 1]}]"

def test_without_ranks(): pass
"""
    )
    options = ("--world", "gloo", "-p", "no:cacheprovider")
    pytester.runpytest_inprocess(*options).assert_outcomes(passed=9)
    expected = "+session +package +class +function first -function second -class +module +a a -a +b b -b -module "
    expected += "+module last -module -package -session finish"
    for rank in range(2):
        assert (package / f"log2-{rank}").read_text().split() == expected.split()
    only_one = ["+session", "+package", "three", "-package", "-session", "finish"]
    assert (package / "log3-2").read_text().split() == only_one


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["pool", "fresh"])
def test_conftest_files_of_a_folder_serve_each_of_its_files(pytester, isolation):
    pytester.makeconftest("import pytest\n\n@pytest.fixture\ndef given(): return 1")
    folder = pytester.mkdir("folder")
    (folder / "conftest.py").write_text(
        """
import pytest

told = []

@pytest.fixture
def given(given): return given + 1

@pytest.fixture(autouse=True)
def telling(given): told.append(given)

@pytest.fixture(params=["one"])
def several(request): return told
"""
    )
    test = "def test_it(rank, given, several):\n    assert given == 2 and several[-1:] == [2]\n"
    for name in ("first", "second"):
        (folder / f"test_{name}.py").write_text(f"import pytest\n\n@pytest.mark.world_size(2)\n{test}")
    options = ("--world", "gloo", "--isolation", isolation, "-p", "no:randomly", "-p", "no:cacheprovider")
    pytester.runpytest_inprocess(*options).assert_outcomes(passed=2)


def test_an_error_in_a_late_teardown_belongs_to_the_test_that_pytest_blames(run):
    result = run(
        """
@pytest.fixture(scope="module")
def broken(rank_of):
    yield
    if dist.get_rank() == 1:
        raise OSError("cannot give it back")

@pytest.fixture(scope="module")
def rank_of():
    yield

@W
def test_one(broken): pass

@W
def test_two(broken): pass
""",
        test_later=HEAD + "@W\ndef test_three(): pass",
    )
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_two?gloo-2?*", "*OSError: cannot give it back*"])


@pytest.mark.parametrize(
    ("source", "runs"),
    [
        ("@W\ndef test_it(rank, world_size, request): assert rank < world_size == 2", 2),
        ("@W\n@pytest.mark.parametrize('x', [3])\ndef test_it(x, device, group): assert group.size() == 2 < x", 2),
        ("@W\ndef test_it(rank, tmp_path): assert tmp_path.is_dir()", 4),
        ("@pytest.fixture\ndef own(rank): yield rank\n\n@W\ndef test_it(own): assert own == dist.get_rank()", 3),
        ("class TestIt:\n    @W\n    def test_it(self, rank): assert rank == dist.get_rank()", 2),
    ],
    ids=["nothing", "parameter", "folder", "fixture", "class"],
)
def test_simulated_ranks_are_set_up_in_one_run(run, monkeypatch, source, runs):
    seen, honest = [], SimulatedRanks.run_bodies
    monkeypatch.setattr(SimulatedRanks, "run_bodies", lambda *all, **more: seen.append(1) or honest(*all, **more))
    run(source, world="sim").assert_outcomes(passed=1)
    assert len(seen) == runs


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_body_may_ask_for_fixtures(run, world):
    result = run(
        """
@pytest.fixture
def known(rank):
    return [rank]

@pytest.fixture
def late(known, rank, monkeypatch):
    monkeypatch.setenv("LATE", str(rank))
    yield known
    print("torn down", rank, os.environ["LATE"])

@W
def test_asks(request, known):
    dist.barrier()
    mine = request.getfixturevalue("late")
    rank = request.getfixturevalue("rank")
    dist.barrier()
    assert mine is request.getfixturevalue("known") is known == [rank] == [dist.get_rank()]
    assert os.environ["LATE"] == str(rank)

@W
@pytest.mark.parametrize("name", ["late", "tmp_path"])
def test_asks_by_name(request, name):
    first = request.getfixturevalue(name)
    dist.barrier()
    assert first is request.getfixturevalue(name)

def test_after():
    assert "LATE" not in os.environ
""",
        "-rP",
        world=world,
    )
    result.assert_outcomes(passed=4)
    for rank in range(2):
        assert result.stdout.str().count(f"torn down {rank} {rank}") == 2


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_body_may_add_finalizers(run, world):
    result = run(
        """
@W
def test_alone(request, rank):
    request.addfinalizer(lambda: print(f"last {rank} {dist.get_rank()}"))
    request.addfinalizer(dist.barrier)

@W
@pytest.mark.schedules(2)
def test_beside_a_fixture(request, rank, tmp_path):
    request.addfinalizer(lambda: dist.barrier() or tmp_path.rmdir())

@W
def test_fails(request, rank):
    request.addfinalizer(lambda: 1 / rank)
""",
        "-rA",
        world=world,
    )
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["E   ZeroDivisionError: division by zero"])
    for rank in range(2):
        assert result.stdout.str().count(f"last {rank} {rank}") == 1


PARAMETERS = """
@pytest.fixture(params=["a", "b"])
def letter(request, rank):
    dist.barrier()
    yield request.param
    dist.barrier()

@W
def test_letter(letter, rank): assert letter in "ab"

@pytest.fixture
def number(request, rank):
    x = torch.tensor([request.param])
    dist.all_reduce(x)
    return x.item()

@W
@pytest.mark.parametrize("number", [3, 4], indirect=True)
def test_number(number): assert number in (6, 8)

@pytest.fixture(params=["before", "after"])
def fails(request):
    if request.param == "before":
        raise OSError("no such disk")
    yield
    raise OSError("disk full")

@W
def test_fails(fails): pass
"""


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_fixture_with_parameters_is_set_up_and_torn_down_like_others(run, world):
    result = run(PARAMETERS, "-p", "no:randomly", world=world)
    result.assert_outcomes(passed=5, errors=2)
    before, after = f"*at setup of test_fails?before-{world}-2?*", f"*at teardown of test_fails?after-{world}-2?*"
    result.stdout.fnmatch_lines([before, "*OSError: no such disk*", after, "*OSError: disk full*"])


SEEDED = """
import numpy, random
from hypothesis import given, settings, strategies as st

@pytest.fixture(autouse=True)
def alike():
    torch.manual_seed(42); random.seed(42); numpy.random.seed(42)
    torch.set_default_dtype(torch.float64)
    yield
    assert torch.get_default_dtype() == torch.float64
    torch.set_default_dtype(torch.float32)

DRAWS = [lambda: torch.rand(3), lambda: random.gauss(0, 1), random.random, numpy.random.rand, numpy.random.randn]

@W
@pytest.mark.parametrize("draw", DRAWS, ids=range(5))
def test_ranks_draw_alike(draw):
    number = torch.as_tensor(draw())
    others = number.clone()
    dist.broadcast(others, 0)
    assert torch.equal(number, others) and torch.ones(1).dtype == torch.float64

@pytest.fixture
def model():
    return torch.nn.Linear(2, 2)

@W
def test_what_comes_next_was_not_drawn_before(model):
    assert not torch.equal(torch.nn.Linear(2, 2).weight, model.weight)

@W
@settings(max_examples=4, derandomize=True)
@given(n=st.integers())
def test_examples_go_on_from_there(n):
    number, others = torch.rand(1), torch.zeros(1)
    others.copy_(number)
    dist.broadcast(others, 0)
    assert torch.equal(number, others)
"""


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_body_goes_on_with_the_random_numbers_and_the_dtype_of_its_fixtures(run, world):
    run(SEEDED, world=world).assert_outcomes(passed=7)
