"""The item of a simulated rank: its fixtures are its own, and plugins see the collected item."""

from __future__ import annotations

import pytest

WORLDS = pytest.mark.parametrize("world", ["sim", "gloo"])

HOOK = """
import pytest

phases = {}

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    setattr(item, f"report_{report.when}", report)
    item.stash.setdefault(key, {})[report.when] = report.passed
    phases.setdefault(item, []).append(report.when)
    if hasattr(item, "left"):
        assert item.funcargs["seen"] == 1 and (item.cls is None or item.instance.number == 1)
        report.user_properties.append(("left", item.left))
    return report

key = pytest.StashKey()

def pytest_terminal_summary(terminalreporter):
    for report in terminalreporter.stats["passed"]:
        print("properties", report.head_line, report.user_properties)
"""


@pytest.mark.parametrize("method", [False, True], ids=["function", "method"])
def test_a_hook_and_a_fixture_of_a_rank_see_the_same_item(run, method):
    test = "@W\n{0}def test_it({1}seen): pass\n"
    source = test.format("", "") if not method else "class TestIt:\n    " + test.format("    ", "self, ")
    result = run(
        """
import conftest

@pytest.fixture
def seen(request, rank):
    item = request.node
    if item.cls is not None:
        request.instance.number = rank
    item.left = "by a fixture"
    item.of_fixture = rank
    del item.of_fixture
    yield rank
    dist.barrier()
    assert not hasattr(item, "of_fixture")
    assert item.report_call.passed and item.stash[conftest.key]["call"]
    assert conftest.phases[item] == ["setup", "call"]
    assert len({item, *conftest.phases}) == 1 and type(item).__name__ == "Function"

"""
        + source,
        "-s",
        world="sim",
        conftest=HOOK,
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["properties *test_it?sim-2? [[]('left', 'by a fixture')[]]"])


@WORLDS
def test_finalizers_run_in_the_reverse_order_on_their_rank(run, pytester, world):
    result = run(
        """
def log(rank, what):
    assert dist.get_rank() == rank
    with open(f"log{rank}", "a") as file:
        file.write(f"{what} ")

@pytest.fixture
def outer(request, rank):
    request.node.addfinalizer(lambda: log(rank, "node"))
    request.addfinalizer(lambda: log(rank, "request"))
    yield
    log(rank, "outer")

@pytest.fixture
def inner(outer, rank):
    yield
    dist.barrier()
    log(rank, "inner")
    raise OSError(f"no such disk on {rank}")

@W
def test_it(request, inner, rank):
    request.addfinalizer(lambda: log(rank, "body"))
""",
        world=world,
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*OSError: no such disk on *"])
    for rank in range(2):
        assert (pytester.path / f"log{rank}").read_text().split() == ["body", "inner", "outer", "request", "node"]


@WORLDS
def test_a_fixture_that_a_body_requests_may_override_another(run, world):
    run(
        """
@pytest.fixture
def name(name, rank):
    dist.barrier()
    return f"{name} {rank}"

@W
def test_it(request, rank):
    dist.barrier()
    assert request.getfixturevalue("name") == f"base {rank}"
    with pytest.raises(pytest.FixtureLookupError):
        request.getfixturevalue("no_such_fixture")
""",
        world=world,
        conftest="import pytest\n\n@pytest.fixture\ndef name(): return 'base'\n",
    ).assert_outcomes(passed=1)


def test_a_fixture_with_the_scope_of_its_parameter_is_torn_down_by_its_rank(run, pytester):
    run(
        """
@pytest.fixture
def letter(request):
    rank = dist.get_rank()
    dist.barrier()
    yield request.param, rank
    dist.barrier()
    with open("log", "a") as file:
        file.write(f"{request.param}{rank} ")

@W
@pytest.mark.parametrize("letter", ["a", "b"], indirect=True, scope="module")
def test_it(letter, rank): assert letter[1] == rank

def test_after():
    with open("log") as file:
        assert len(file.read().split()) == 4
""",
        "-p",
        "no:randomly",
        world="sim",
    ).assert_outcomes(passed=3)
    assert sorted((pytester.path / "log").read_text().split()) == ["a0", "a1", "b0", "b1"]


def test_a_fixture_for_all_ranks_whose_set_up_was_stopped_is_set_up_again(run, pytester):
    result = run(
        """
begun = []

@pytest.fixture(scope="module")
def hangs():
    begun.append(1)
    while len(begun) == 1:
        time.perf_counter()

@pytest.fixture(scope="module")
def meets():
    dist.barrier()
    yield
    with open("log", "a") as file:
        file.write("end ")

@W
@pytest.mark.timeout(1)
def test_hangs(request, monkeypatch):
    monkeypatch.setenv("SET", "yes")
    request.getfixturevalue("hangs")

@W
def test_hangs_no_more(request):
    assert "SET" not in os.environ
    request.getfixturevalue("hangs")

@W
def test_another_rank_fails(request, rank):
    if rank == 1:
        raise OSError("no such disk")
    request.getfixturevalue("meets")

@W
def test_none_fails(request, rank):
    if rank == 1:
        dist.barrier()
    request.getfixturevalue("meets")
""",
        "-p",
        "no:randomly",
        world="sim",
    )
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["*RankTimeout*", "*OSError: no such disk"])
    assert (pytester.path / "log").read_text().split() == ["end"]


def test_a_rank_that_is_left_behind_in_a_set_up_changes_no_later_test(run):
    source = """
import threading

@pytest.fixture
def own(rank):
    yield [rank]

@pytest.fixture
def hangs(own, rank, monkeypatch):
    monkeypatch.setenv("HANGS", "yes")
    if rank == 1:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire(timeout=3)  # in C, where the rank does not stop
    dist.barrier()

@W
@pytest.mark.timeout(1)
def test_hangs(hangs): pass

@W
@pytest.mark.parametrize("number", range(4))
def test_after(own, rank, request, monkeypatch, number):
    monkeypatch.setenv("OWN", str(rank))
    end = time.perf_counter() + 0.7
    while time.perf_counter() < end:
        pass
    dist.barrier()
    assert own == request.getfixturevalue("own") == [rank]
    assert os.environ["OWN"] == str(rank) and "HANGS" not in os.environ
"""
    result = run(source, world="sim")
    result.assert_outcomes(passed=4, errors=1)
    result.stdout.fnmatch_lines(["*rank 1 does not stop and is left behind*"])


@WORLDS
def test_a_property_uses_the_fixtures_and_the_instance_of_its_rank(run, world):
    result = run(
        """
from hypothesis import HealthCheck, given, settings, strategies as st

shared = settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])

@pytest.fixture
def late(rank):
    dist.barrier()
    return [rank]

class TestProperties:
    @pytest.fixture(autouse=True)
    def number(self, rank):
        self.number = rank
        dist.barrier()

    @W
    @shared
    @given(x=st.integers())
    def test_passes(self, x, rank, request, tmp_path):
        dist.barrier()
        assert self.number == rank and request.instance is self
        assert request.getfixturevalue("late") == [rank]
        assert request.node.funcargs["tmp_path"] == tmp_path

    @W
    @shared
    @given(x=st.integers())
    def test_fails(self, x, rank, request):
        assert request.getfixturevalue("late") == [rank]
        assert x < 3 or rank == 0
""",
        world=world,
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*x=3*"])


def test_the_fixtures_of_ranks_are_gone_when_the_test_has_ended(run):
    """A fixture of wider scope keeps references to fixtures that use it."""
    run(
        """
import gc, weakref

alive = weakref.WeakSet()
items = []

class Model: pass

@pytest.fixture(scope="module")
def wide(): return 1

@pytest.fixture
def model(tmp_path, wide, request):
    items.append(weakref.ref(request.node))
    model = Model()
    alive.add(model)
    return model

class TestMethods:
    @W
    def test_model(self, model): assert len(alive) == 2

    def test_gone(self): assert not alive

@W
def test_late(request): assert request.getfixturevalue("model") in alive

def test_gone():
    assert not alive
    gc.collect()
    assert len(items) == 4 and not any(item() for item in items)
""",
        "-p",
        "no:randomly",
        world="sim",
        new_process=True,  # pytester keeps the arguments of hooks
    ).assert_outcomes(passed=4)


def test_what_ranks_record_on_their_item_is_reported_once(run):
    result = run(
        """
@pytest.fixture
def recorded(record_property):
    record_property("set-up", 0)

@W
def test_it(request, rank, record_property, recorded):
    request.node.user_properties.append(("of all", 1))
    dist.barrier()
    record_property("of each", rank)
""",
        "-s",
        world="sim",
        conftest=HOOK,
    )
    result.assert_outcomes(passed=1)
    told = "properties * [[]('set-up', 0), ('of all', 1), ('of each [[]rank 0[]]', 0), ('of each [[]rank 1[]]', 1)[]]"
    result.stdout.fnmatch_lines([told])
