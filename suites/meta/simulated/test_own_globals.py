"""``own_globals``: modules whose globals each simulated rank has for itself, as processes have."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import Unsupported
from pdlcheck.worlds import check_same_on_worlds, get_world
from pdlcheck.worlds.simulated.module_globals import cause

from . import shared_globals

pytestmark = pytest.mark.usefixtures("only_this_file")
PROGRAMS = [program for program, *_ in [*shared_globals.BROKEN, *shared_globals.ALSO_BROKEN]]
PARALLEL_STATE = '''
"""Groups in module globals, as training frameworks keep them."""
import torch
import torch.distributed as dist

_MODEL_GROUP = None
_GROUPS = {}
_SIZES = {"model": 0, "data": 0}


class Place:
    number = None


class Manager:
    pass


manager = Manager()
scale = torch.ones(2)


def initialize(model_size):
    global _MODEL_GROUP, last
    assert _MODEL_GROUP is None, "model parallel group is already initialized"
    for first in range(0, dist.get_world_size(), model_size):
        ranks = list(range(first, first + model_size))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            _MODEL_GROUP = group
            _GROUPS["model"] = manager.group = group
            Place.number = ranks.index(dist.get_rank())
            last = ranks[-1]
    scale.mul_(dist.get_rank())
    _SIZES["model"] = model_size


def destroy():
    global _MODEL_GROUP
    _MODEL_GROUP = None
    _GROUPS.clear()
    del manager.group


def places():
    """The sum over the ranks of each group, by three ways to it."""
    found = []
    for group in (_MODEL_GROUP, _GROUPS["model"], manager.group):
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total, group=group)
        found.append(total.item())
    return found, Place.number, last, scale.tolist(), _SIZES
'''


def initialized(model_size):
    import parallel_state

    parallel_state.initialize(model_size)
    found = parallel_state.places()
    parallel_state.destroy()
    return found


def _expected(rank):
    first = rank // 2 * 2
    return [2 * first + 1] * 3, rank % 2, first + 1, [rank] * 2, {"model": 2, "data": 0}


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """Import a user's modules, which are not installed."""
    folder = tmp_path_factory.mktemp("user")
    shutil.copy(Path(shared_globals.__file__), folder / "train.py")
    (folder / "train_late.py").write_text("NAME = 'late'\nuses = 0\n")
    (folder / "parallel_state.py").write_text(PARALLEL_STATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        import parallel_state
        import train

        yield train, parallel_state
        for name in ("train", "train_late", "parallel_state"):
            sys.modules.pop(name, None)


@pytest.fixture
def train(modules):
    return modules[0]


@pytest.fixture
def parallel_state(modules):
    return modules[1]


@pytest.fixture
def gloo():
    world = get_world("gloo")
    yield world
    world.close()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_differs_with_shared_globals_is_the_same_as_on_processes(train, gloo, program):
    world = get_world("sim", own_globals=["train", "train_late"])
    check_same_on_worlds(getattr(train, program.__name__), world_size=2, worlds=(world, gloo))


def test_a_module_that_keeps_groups_is_set_up_on_every_rank(parallel_state):
    world = get_world("sim", own_globals=["parallel_state"])
    for _ in range(2):
        assert world.run(initialized, 2, world_size=4) == [_expected(rank) for rank in range(4)]
    assert parallel_state._MODEL_GROUP is None
    assert not hasattr(parallel_state, "last")
    assert parallel_state.scale.tolist() == [1, 1]
    assert parallel_state._SIZES == {"model": 0, "data": 0}


def test_shared_it_is_told_with_the_module_and_the_cure(monkeypatch, tmp_path):
    (tmp_path / "shared_state.py").write_text(PARALLEL_STATE)
    monkeypatch.syspath_prepend(tmp_path)
    import shared_state

    def initialized():
        shared_state.initialize(2)
        return shared_state.places()

    words = r"give each rank those of shared_state \(pdlcheck_own_globals in an ini file, own_globals of get_world\)"
    with pytest.raises(Unsupported, match=words):
        get_world("sim").run(initialized, world_size=4)
    del sys.modules["shared_state"]


@pytest.mark.parametrize("name", ["sim", "gloo"])
def test_ranks_that_stay_open_keep_theirs_and_the_controllers_are_its_own(train, name):
    world = get_world(name, own_globals=["train"]) if name == "sim" else get_world(name)
    with world.open(2) as ranks:
        assert ranks.run(train.counter) == [3, 3]
        train.step_count = 100
        train.seen.append("of the controller")
        assert ranks.run(train.counter) == [6, 6]
        assert ranks.run(train.appended_by_one) == [1, 0]
    assert (train.step_count, train.seen) == (100, ["of the controller"])
    world.close()
    train.step_count = 0
    train.seen.clear()


def test_new_ranks_begin_with_what_the_controller_has_then(train):
    world = get_world("sim", own_globals=["train"])
    assert world.run(train.counter, world_size=2) == [3, 3]
    train.step_count = 10
    train.weights.fill_(5)
    assert world.run(train.counter, world_size=3) == [13] * 3
    assert world.run(train.updated, world_size=2) == [[6, 6, 6]] * 2
    assert train.weights.tolist() == [5, 5, 5]
    train.step_count = 0
    train.weights.zero_()


def test_after_a_failure_ranks_begin_anew_as_processes_that_are_replaced(train):
    def fails():
        train.counter()
        raise OSError("no more")

    with get_world("sim", own_globals=["train"]).open(2) as ranks:
        assert ranks.run(train.counter) == [3, 3]
        with pytest.raises(OSError, match="no more"):
            ranks.run(fails)
        assert train.step_count == 0
        assert ranks.run(train.counter) == [3, 3]


def test_a_rank_that_goes_through_a_container_goes_on_with_its_own(train):
    def sums():
        train.cache.update(a=torch.tensor(1.0), b=torch.tensor(2.0), c=torch.tensor(3.0))
        total = 0.0
        for value in train.cache.values():  # another rank runs at each step
            dist.all_reduce(value)
            total += value.item()
        return total

    train.cache.update(a=torch.zeros(1), b=torch.zeros(1), c=torch.zeros(1))
    try:
        assert get_world("sim", own_globals=["train"]).run(sums, world_size=3) == [18.0] * 3
        assert [value.item() for value in train.cache.values()] == [0, 0, 0]
    finally:
        train.cache.clear()


@pytest.mark.parametrize("seed", range(5))
def test_it_does_not_matter_who_runs_when(parallel_state, seed):
    world = get_world("sim", own_globals=["parallel_state"], schedule=f"random:{seed}")
    assert world.run(initialized, 2, world_size=4) == [_expected(rank) for rank in range(4)]


def test_the_globals_of_other_modules_are_still_found_to_be_the_cause(train, gloo):
    world = get_world("sim", own_globals=["parallel_state"])
    with pytest.raises(AssertionError) as raised:
        check_same_on_worlds(train.counter, world_size=2, worlds=(world, gloo))
    assert "train.step_count  int, changed by ranks 0 and 1" in str(raised.value)
    cure = "cure          get_world(\"sim\", own_globals=['train']), or pdlcheck_own_globals in an ini file"
    assert cure in str(raised.value)
    train.step_count = 0


def test_a_module_that_cannot_be_imported_is_named():
    with pytest.raises(ValueError, match="own_globals names 'no_such', which cannot be imported: ModuleNotFoundError"):
        get_world("sim", own_globals=["no_such"]).run(dist.get_rank, world_size=2)


@pytest.mark.parametrize("given", ["parallel_state", [3], [torch]])
def test_what_is_no_list_of_names_is_refused(given):
    with pytest.raises(TypeError, match=r"own_globals takes a list of modules' names, got .*; pass \['mine"):
        get_world("sim", own_globals=given)


def test_a_package_stands_for_its_modules(tmp_path, monkeypatch):
    package = tmp_path / "framework"
    package.mkdir()
    (package / "__init__.py").write_text("from . import state\n")
    (package / "state.py").write_text("count = 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import framework

    def count():
        framework.state.count += 1
        dist.barrier()
        return framework.state.count

    try:
        assert get_world("sim").run(count, world_size=2) == [2, 2]
        framework.state.count = 0
        assert get_world("sim", own_globals=["framework"]).run(count, world_size=2) == [1, 1]
    finally:
        for name in ("framework", "framework.state"):
            del sys.modules[name]


STANDS_IN = """
from torch.distributed import *  # among them `reduce_op`, which warns whoever asks it for anything

class Lazy:
    \"\"\"Stands for what is costly to make.\"\"\"
    @property
    def __class__(self):
        raise RuntimeError("it has been made")

lazy = Lazy()
count = 0
"""


def test_an_object_that_stands_for_another_one_is_not_asked(tmp_path, monkeypatch):
    (tmp_path / "stands_in.py").write_text(STANDS_IN)
    monkeypatch.syspath_prepend(tmp_path)
    import stands_in

    def count():
        stands_in.count += 1
        stands_in.barrier()
        return stands_in.count

    try:
        assert get_world("sim", own_globals=["stands_in"]).run(count, world_size=2) == [1, 1]
    finally:
        del sys.modules["stands_in"]


INNER = """
import pytest
import torch.distributed as dist

import groups_of_ranks


@pytest.fixture
def model_parallel(rank):
    groups_of_ranks.initialize(2)
    yield
    groups_of_ranks.destroy()


@pytest.mark.world_size(4)
def test_places(rank, model_parallel):
    assert groups_of_ranks.places()[1] == rank % 2


@pytest.mark.world_size(4)
def test_patched(rank, model_parallel, monkeypatch):
    monkeypatch.setattr(groups_of_ranks.Place, "number", 10 + rank)
    dist.barrier()
    assert groups_of_ranks.places()[1] == 10 + rank


@pytest.mark.world_size(4)
def test_as_before(rank, model_parallel):
    assert groups_of_ranks.places()[1] == rank % 2


def test_of_the_controller(world):
    assert groups_of_ranks._MODEL_GROUP is None
    assert world.run(lambda: groups_of_ranks._MODEL_GROUP is None, world_size=3) == [True] * 3
"""


@pytest.fixture
def inner(pytester):
    pytester.makepyfile(groups_of_ranks=PARALLEL_STATE, test_inner=INNER)
    pytester.syspathinsert()
    return pytester


def test_an_ini_value_gives_ranks_their_own_in_fixtures_and_tests(inner):
    inner.makeini("[pytest]\npdlcheck_own_globals = groups_of_ranks\n")
    result = inner.runpytest_inprocess("--world", "sim,gloo", "-p", "no:cacheprovider", "-p", "no:randomly")
    result.assert_outcomes(passed=8)


@pytest.mark.slow
def test_without_it_the_report_says_what_to_write(inner, monkeypatch):
    monkeypatch.setattr(cause, "CAUSE_LIMIT_S", float("inf"))  # for loaded machines
    result = inner.runpytest_inprocess("--world", "sim,gloo", "-p", "no:cacheprovider", "-k", "test_places")
    result.assert_outcomes(passed=1, failed=1, errors=1)  # the fixture's end fails too
    result.stdout.fnmatch_lines(
        [
            "fails on sim, passes on gloo: simulated ranks share module globals.",
            "With globals of its own for each rank it passes on sim too",
            "pdlcheck_own_globals = groups_of_ranks, in an ini file, makes it so in every run.",
        ]
    )


def test_modules_that_it_takes_together_are_found_by_halving():
    tried = []

    def holds(names):
        tried.append(names)
        return {"b", "g"} <= set(names)

    assert cause._few("abcdefgh", holds, cause._Trials()) == ["b", "g"]
    assert cause._few("abcdefgh", lambda names: "f" in names, cause._Trials()) == "f"
    assert len(tried) < 15


def test_a_container_or_an_object_that_is_returned_is_what_it_was_for_the_rank(parallel_state):
    def returns():
        parallel_state._SIZES["model"] = 10 + dist.get_rank()
        parallel_state.manager.group = dist.get_rank()
        dist.barrier()
        return {"sizes": parallel_state._SIZES}, parallel_state.manager, parallel_state.scale

    found = get_world("sim", own_globals=["parallel_state"]).run(returns, world_size=2)
    assert [sizes["sizes"]["model"] for sizes, *_ in found] == [10, 11]
    assert [manager.group for _, manager, _ in found] == [0, 1]
    assert found[0][2] is not found[1][2]


def test_a_name_in_the_ini_file_that_cannot_be_imported_fails_the_test_and_is_named(inner):
    inner.makeini("[pytest]\npdlcheck_own_globals = groups_of_ranks mispelt\n")
    result = inner.runpytest_inprocess("--world", "sim", "-p", "no:cacheprovider", "-k", "controller")
    result.stdout.fnmatch_lines(["*own_globals names 'mispelt', which cannot be imported: ModuleNotFoundError*"])
