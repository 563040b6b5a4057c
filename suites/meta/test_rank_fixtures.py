"""Fixtures in rank processes: when they are set up and torn down, and whose temporary folders are whose."""

from __future__ import annotations

import pytest

from pdlcheck.worlds.simulated import SimulatedRanks

from .conftest import HEAD
from .needs_mpi import needs_mpi


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_tmp_path_is_the_ranks_own_and_shared_tmp_path_is_one(run, world, pytester):
    source = """
@W
def test_paths(rank, tmp_path, shared_tmp_path, tmp_path_factory):
    (tmp_path / "mine").write_text(str(rank))
    (shared_tmp_path / str(rank)).write_text("")
    paths = [None, None]
    dist.all_gather_object(paths, (str(tmp_path), str(shared_tmp_path)))
    assert paths[0][0] != paths[1][0] and paths[0][1] == paths[1][1]
    assert (tmp_path / "mine").read_text() == str(rank)
    assert sorted(os.listdir(shared_tmp_path)) == ["0", "1"]
    assert tmp_path_factory.mktemp("more").is_dir()

@W
def test_shared_is_new(shared_tmp_path):
    assert os.listdir(shared_tmp_path) == []

@W
def test_fails(rank, tmp_path, shared_tmp_path):
    (tmp_path / "kept").write_text("")
    (shared_tmp_path / "kept").write_text("")
    dist.barrier()
    assert rank == 0
"""
    base = pytester.path / "base"
    result = run(source, f"--basetemp={base}", "-o", "tmp_path_retention_policy=failed", world=world)
    result.assert_outcomes(passed=2, failed=1)
    kept = sorted(path.parent.name for path in base.rglob("kept") if "current" not in str(path))
    assert [name[:10] for name in kept] == ["test_fails"] * (3 if world == "gloo" else len(kept)), kept
    assert not list(base.rglob("mine")), "the folders of tests that passed are gone"
    assert all("shared" not in path.name for path in base.iterdir() if "test_paths" in path.name)


CACHE = """
@pytest.fixture
def slow(cache):
    assert cache.get("mine/known", None) == "by the controller"
    return cache

@W
def test_reads_and_writes(rank, slow, request):
    assert request.config.cache is slow
    slow.set(f"mine/of {rank}", [rank])
    (slow.mkdir("mine") / str(rank)).touch()

@W
def test_values_are_those_of_one_rank(rank, cache):
    for _ in range(100):
        cache.set("mine/both", "x" * (1 + 9 * rank))
        assert cache.get("mine/both", None) in ("x", "x" * 10)
"""


@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_the_cache_is_that_of_the_session(pytester, world):
    pytester.makeini("[pytest]\ncache_dir = kept")
    pytester.makeconftest("def pytest_configure(config): config.cache.set('mine/known', 'by the controller')")
    pytester.makepyfile(HEAD + CACHE)
    pytester.runpytest_inprocess("--world", world, "-p", "no:randomly").assert_outcomes(passed=2)
    values = pytester.path / "kept" / "v" / "mine"
    assert sorted(path.name for path in values.iterdir()) == ["both", "known", "of 0", "of 1"]
    assert sorted(path.name for path in (pytester.path / "kept" / "d" / "mine").iterdir()) == ["0", "1"]
    pytester.runpytest_inprocess("--world", world, "--lf", "--ff", "--cache-clear").assert_outcomes(passed=2)


def test_without_its_plugin_the_cache_is_missing_in_ranks_too(run):
    run("@W\ndef test_it(cache): pass").stdout.fnmatch_lines(["E * fixture 'cache' not found"])


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
    pytester.runpytest_subprocess(*options).assert_outcomes(passed=2)


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


SPENT = """
def log(what):
    with open(f"log{os.environ['RANK']}", "a") as file:
        file.write(what + " ")

@pytest.fixture(scope="session")
def wide():
    log("(")
    yield
    log(")")

@pytest.fixture
def own():
    log("[")
    yield
    log("]")

@W
def test_first(wide, own): pass

@W
def test_destroys_the_group(wide, own): dist.destroy_process_group()

@W
def test_makes_too_many_groups(wide, own):
    for _ in range(40):
        dist.new_group([0, 1])

@W
def test_with_the_fixture(wide): pass

@W
def test_destroys_the_group_and_has_no_fixture(): dist.destroy_process_group()

@W
def test_skips_while_another_rank_communicates(rank, wide, own):
    if rank == 1:
        pytest.skip("not this one")
    dist.barrier()

@W
def test_fails(wide, own): assert dist.destroy_process_group()

@W
def test_last(rank, own): assert dist.get_rank() == rank
"""


@pytest.mark.parametrize("world", ["gloo", pytest.param("mpi", marks=needs_mpi)])
def test_fixtures_are_torn_down_before_other_processes_take_over(run, pytester, world):
    result = run(SPENT, "-p", "no:randomly", world=world)
    result.assert_outcomes(passed=6, skipped=1, failed=1)
    for rank in range(2):
        log = (pytester.path / f"log{rank}").read_text().replace(" ", "")
        assert log.startswith("([][])([])()([]"), log
        assert log.count("[") == log.count("]") == 6
        assert log.count("(") == log.count(")")


ENDS = """
@pytest.fixture(scope="session")
def wide():
    yield
    with open(f"ended{dist.get_world_size()}-{dist.get_rank()}", "w"):
        pass

@pytest.mark.world_size(3)
def test_on_three(wide): pass

@pytest.mark.world_size(2)
def test_on_two(wide): pass

%s

@pytest.mark.world_size(2, 3)
def test_never(wide): pass
"""
END_IN_A_RANK = "@W\ndef test_ends(rank, wide):\n    if rank == 1:\n        pytest.exit('enough', 9)"
END_IN_THE_CONTROLLER = "def test_ends(): pytest.exit('enough')"
END_BY_A_HOOK = "@W\ndef test_ends(wide): pass"
END_OF_A_TEARDOWN = """
@pytest.fixture
def fails(rank):
    yield
    raise OSError("in the last teardown")

@W
def test_ends(wide, fails): assert 0
"""
HOOK = """
def pytest_sessionfinish(session, exitstatus):
    with open("status", "a") as file:
        print(int(exitstatus), int(session.exitstatus), file=file)

def pytest_runtest_makereport(item, call):
    if call.when == "teardown" and "test_ends[gloo-2]" in item.nodeid:
        item.session.shouldstop = "enough"
"""


@pytest.mark.parametrize(
    ("source", "status"),
    [(END_IN_A_RANK, 9), (END_IN_THE_CONTROLLER, 2), (END_BY_A_HOOK, 2), (END_OF_A_TEARDOWN, 1)],
    ids=["rank", "controller", "hook", "teardown"],
)
def test_fixtures_of_the_session_are_torn_down_when_it_ends_early(run, pytester, source, status):
    hook = HOOK if source == END_BY_A_HOOK else HOOK.partition("def pytest_runtest_makereport")[0]
    result = run(ENDS % source, "-x", "-p", "no:randomly", conftest=hook)
    assert result.ret == status
    assert sorted(path.name for path in pytester.path.glob("ended*")) == [
        *(f"ended2-{rank}" for rank in range(2)),
        *(f"ended3-{rank}" for rank in range(3)),
    ]
    assert (pytester.path / "status").read_text() == f"{status} {status}\n" * 6


@pytest.mark.parametrize("isolation", ["pool", "reinit"])
def test_a_wide_fixture_that_the_failure_of_another_rank_stopped_is_set_up_again(run, pytester, isolation):
    source = """
@pytest.fixture(scope="session")
def log(rank_of):
    with open(f"log{rank_of}", "a") as log:
        yield lambda *words: print(*words, file=log)

@pytest.fixture(scope="session")
def rank_of(): return dist.get_rank()

@pytest.fixture(scope="session")
def fails(rank_of):
    if rank_of == 1:
        raise OSError("no such disk")

@pytest.fixture(scope="session")
def total(request, log):
    request.addfinalizer(lambda: log("end"))
    log("begin")
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()

@W
def test_another_fixture_fails(fails, total): pass

@W
def test_the_fixture_is_well(total): assert total == 2

@W
def test_it_is_kept(total): assert total == 2

@W
def test_a_failed_one_stays_failed(fails, total): pass
"""
    result = run(source, "--isolation", isolation, "-p", "no:randomly")
    result.assert_outcomes(passed=2, errors=2)
    assert result.stdout.str().count("OSError: no such disk") > 1
    assert "PeerFailed" not in result.stdout.str()
    logs = [(pytester.path / f"log{rank}").read_text().split() for rank in range(2)]
    assert logs == [["begin", "end"] * 2, ["begin", "end"]]


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


MEET = """
@pytest.fixture
def model(rank):
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        dist.broadcast(model.weight.fill_(rank + 1.0), 1)
    return model

@pytest.fixture
def pair():
    group = dist.new_group([0, 1])
    yield group
    dist.barrier(group=group)
    dist.destroy_process_group(group)

@pytest.fixture
def named(rank, monkeypatch):
    monkeypatch.setenv("NAMED", str(rank))
    dist.barrier()
    assert os.environ["NAMED"] == str(rank)
    yield [rank]
    assert os.environ["NAMED"] == str(rank)
    dist.barrier()
    assert os.environ["NAMED"] == str(rank)

@pytest.fixture
def inside(request, rank):
    return [request.getfixturevalue("named"), request.getfixturevalue("rank"), rank]

@pytest.fixture(params=["a", "b"])
def letter(request, tmp_path, rank):
    dist.barrier()
    (tmp_path / "letter").write_text(f"{request.param}{rank}")
    return tmp_path / "letter"

@W
def test_model(model): assert model.weight.tolist() == [[2.0, 2.0]]

@W
def test_group(rank, pair, tmp_path): dist.barrier(group=pair)

@W
def test_nested(inside, named, rank): assert inside == [named, rank, rank] and named == [dist.get_rank()]

class TestMethods:
    @pytest.fixture(autouse=True)
    def number(self, rank):
        self.rank = rank
        dist.barrier()
        assert self.rank == rank

    @W
    def test_method(self, rank, letter, request):
        assert letter.read_text()[1] == str(self.rank) == str(rank)
        dist.barrier()
        assert request.instance is self

@pytest.fixture
def fails_on_one(rank, pair):
    if rank == 1:
        raise OSError("no such disk")
    dist.barrier()

@W
def test_fails(fails_on_one): pass

@pytest.fixture
def differs(rank): dist.all_reduce(torch.ones(2 + rank))

@W
def test_differs(differs): pass

def test_after(): assert "NAMED" not in os.environ
"""


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_ranks_may_wait_for_one_another_in_fixtures_of_function_scope(run, world):
    result = run(MEET, world=world)
    result.assert_outcomes(passed=6, errors=2)
    result.stdout.fnmatch_lines_random(
        ["*OSError: no such disk", "*rank 0 was stopped in barrier*", "*CollectiveMismatch: ranks 0 and 1 met in *"]
    )


def test_on_sim_a_wider_fixture_that_waits_for_other_ranks_is_told_with_the_cure(run):
    source = """
@pytest.fixture(scope="module")
def group(): return dist.new_group([0, 1])

@pytest.fixture
def made(group): return group

@W
def test_it(made): pass

@W
def test_it_stays(group): pass
"""
    run(source, world="gloo").assert_outcomes(passed=2)
    result = run(source, world="sim")
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["*Deadlock: no rank can go on*", "*set up once for all simulated ranks: let ranks *"])


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


LATE = """
@pytest.fixture
def late(rank):
    dist.barrier()
    yield [rank]
    dist.barrier()

@pytest.fixture
def later(request): return request.getfixturevalue("late")

@W
def test_asks(request, rank):
    assert request.getfixturevalue("later") == request.getfixturevalue("late") == [rank]
    dist.barrier()

@W
@pytest.mark.parametrize("name", ["late", "later"])
def test_asks_with_a_folder(request, tmp_path, rank, name):
    dist.barrier()
    assert request.getfixturevalue(name) == [rank]
    (tmp_path / "mine").write_text(str(rank))
    dist.barrier()
    assert (tmp_path / "mine").read_text() == str(rank)

@pytest.fixture
def meets_at_the_end(late, tmp_path, rank):
    (tmp_path / "mine").write_text(str(rank))
    yield
    dist.barrier()
    assert (tmp_path / "mine").read_text() == str(rank)

@W
def test_ends(meets_at_the_end): pass

@pytest.fixture
def fails(rank):
    if rank == 0:
        raise OSError("no such disk")
    dist.barrier()

@W
def test_fails(request): request.getfixturevalue("fails")

@W
def test_after(request, late): dist.barrier()
"""


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_ranks_may_wait_for_one_another_in_fixtures_that_a_body_asks_for(run, world):
    result = run(LATE, "-p", "no:randomly", world=world)
    result.assert_outcomes(passed=5, failed=1)
    result.stdout.fnmatch_lines(["*OSError: no such disk", "*rank 1 was stopped in barrier*"])


def test_on_sim_a_wider_fixture_that_a_body_asks_for_and_that_waits_is_told_with_the_cure(run):
    source = """
@pytest.fixture(scope="module")
def group(): return dist.new_group([0, 1])

@W
@pytest.mark.parametrize("again", [0, 1])
def test_it(request, again): assert request.getfixturevalue("group").size() == 2
"""
    run(source, world="gloo").assert_outcomes(passed=2)
    result = run(source, world="sim")
    result.assert_outcomes(failed=2)
    told = "*Unsupported: the fixture 'group' waits for other ranks; *set up once for all simulated ranks: let ranks *"
    result.stdout.fnmatch_lines([told, told])


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_fixture_that_hangs_on_one_rank_is_one_error(run, pytester, world):
    source = """
import time

@pytest.fixture
def meets(rank):
    dist.barrier()
    yield
    dist.barrier()
    with open("torn-down", "a") as file:
        file.write(str(rank))

@pytest.fixture
def hangs(meets, rank):
    if rank == 1:
        time.sleep(60)
    dist.barrier()

@W
@pytest.mark.timeout(2)
def test_it(hangs): pass

@W
def test_after(meets): pass
"""
    result = run(source, world=world)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*time.sleep(60)*"])
    assert sorted((pytester.path / "torn-down").read_text()) == ["0", "1"]  # by the next test


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


def test_a_hint_that_is_kept_with_the_error_of_a_fixture_is_given_once(run, pytester):
    pytester.makeconftest(
        "import pytest, torch.distributed as dist\n\n"
        "@pytest.fixture(scope='session', autouse=True)\ndef all_there(): dist.barrier()\n"
    )
    source = "".join(f"@W\ndef test_{number}(tmp_path): pass\n\n" for number in range(3))
    result = run(source, "-rN", world="sim")  # a summary would say it again, in full where CI is set
    result.assert_outcomes(errors=3)
    assert result.stdout.str().count("set up once for all simulated ranks: let ranks") == 3
