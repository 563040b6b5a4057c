"""Simulated ranks share module globals: if a run on processes ends differently, the report names the globals."""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch

from pdlcheck.worlds import check_same_on_worlds, get_world
from pdlcheck.worlds.simulated.module_globals.run import own_globals

from . import shared_globals

pytestmark = pytest.mark.usefixtures("only_this_file")
PROGRAMS = Path(shared_globals.__file__)
TWINS = [twin for _, _, twin in shared_globals.BROKEN]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Import the programs as a user's module, which is not installed."""
    folder = tmp_path_factory.mktemp("user")
    shutil.copy(PROGRAMS, folder / "train.py")
    (folder / "train_late.py").write_text("NAME = 'late'\nuses = 0\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        import train

        yield train
        for name in ("train", "train_late"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def worlds():
    both = get_world("sim"), get_world("gloo")
    yield both
    for world in both:
        world.close()


def _message(function, worlds, **options):
    with pytest.raises(AssertionError) as caught:
        check_same_on_worlds(function, world_size=2, worlds=worlds, **options)
    return str(caught.value)


BROKEN = [(program, blamed) for program, blamed, _ in shared_globals.BROKEN] + shared_globals.ALSO_BROKEN


@pytest.mark.parametrize(("program", "blamed"), BROKEN, ids=[program.__name__ for program, _ in BROKEN])
def test_the_globals_to_blame_are_named_and_no_others(train, worlds, program, blamed):
    message = _message(getattr(train, program.__name__), worlds)
    assert message.startswith(f"{program.__name__}: rank ")
    assert [line for line in message.splitlines() if "changed by" in line] == [
        next(line for line in message.splitlines() if blamed in line)
    ], message


@pytest.mark.parametrize("program", [*TWINS, *shared_globals.INNOCENT], ids=lambda program: program.__name__)
def test_right_programs_are_the_same_on_both_worlds(train, worlds, program):
    result = check_same_on_worlds(getattr(train, program.__name__), world_size=2, worlds=worlds)
    assert len(result) == 2
    assert None not in result


def test_the_message_says_what_differs_why_and_where(train):
    train.seen.clear()
    lines = _message(train.appended_by_one, ("sim", "gloo")).splitlines()
    assert lines[0] == "appended_by_one: rank 1 returns 1 on sim, 0 on gloo"
    assert lines[1].startswith("  likely cause  simulated ranks share module globals; with those of its own for each")
    assert lines[2].startswith("  shared        train.seen  list, changed by rank 0, ")
    line = int(lines[2].rpartition("train.py:")[2])
    assert "seen" in PROGRAMS.read_text().splitlines()[line - 1]
    assert lines[3] == (
        "  cure          get_world(\"sim\", own_globals=['train']), or pdlcheck_own_globals in an ini file"
    )
    assert lines[4] == "  case          world=sim,gloo world_size=2"


def test_the_users_modules_are_left_as_the_one_simulated_run_left_them(train, worlds):
    train.seen.clear()
    train.limit = 0
    before = [train.seen, train.Trainer, train.net.weight, train.load, train.ids, train.collect]
    _message(train.appended_by_one, worlds)
    _message(train.rebound, worlds)
    after = [train.seen, train.Trainer, train.net.weight, train.load, train.ids, train.collect]
    assert list(map(id, before)) == list(map(id, after))
    assert (train.seen, train.limit) == (["batch"], 10)


def test_two_globals_that_take_each_other_are_named_together(worlds):
    first, second = [0], [0]

    def both():
        first[0] += 1
        second[0] += 1
        torch.distributed.barrier()
        return max(first[0], second[0])

    message = _message(both, worlds)
    assert message.count("list, changed by ranks 0 and 1") == 2
    assert "it takes them together" in message


def test_with_globals_of_its_own_a_rank_trains_a_global_model_as_a_process_does(train, worlds):
    """DDP's gradients on the way are the rank's own; the single model is unchanged afterwards."""
    weights = [parameter.detach().clone() for parameter in train.deep.parameters()]
    with own_globals() as observer:
        on_sim = worlds[0].run(train.trained_by_ddp, world_size=2)
    for ours, theirs in zip(on_sim, worlds[1].run(train.trained_by_ddp, world_size=2), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert "train.deep" in {change.path for change in observer.changes()}
    assert all(map(torch.equal, weights, train.deep.parameters()))


def test_a_difference_that_is_no_globals_is_not_put_on_them(worlds):
    message = _message(_name_of_the_thread, worlds)
    assert "likely cause  not module globals, as far as they can be told apart" in message
    assert "changed by" not in message


def _name_of_the_thread():
    import threading

    return threading.current_thread() is threading.main_thread()


def test_one_world_raises(train, worlds):
    train.seen.clear()

    def needs_a_batch():
        if not train.appended_by_one():
            raise LookupError("no batch")

    message = _message(needs_a_batch, worlds)
    assert message.startswith("needs_a_batch: returns on sim, raises LookupError: no batch on gloo")
    assert "train.seen  list, changed by rank 0" in message


def test_where_both_worlds_raise_the_error_is_the_simulated_one(worlds):
    with pytest.raises(ZeroDivisionError):
        check_same_on_worlds(lambda: 1 / 0, world_size=2, worlds=worlds)


class _Result:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize(
    "value",
    [float("nan"), torch.tensor([1.0, float("nan")]), {"a": [torch.ones(2), (1, None)]}, _Result([1])],
    ids=["nan", "tensor", "nested", "object"],
)
def test_equal_results_are_equal(worlds, value):
    assert len(check_same_on_worlds(lambda: value, world_size=2, worlds=worlds)) == 2


@pytest.mark.parametrize(
    ("on_sim", "elsewhere"), [(1, 1.0), (torch.ones(2), torch.ones(2).double()), ({"a": 1}, {"b": 1}), ([1], [1, 2])]
)
def test_unlike_results_differ(worlds, on_sim, elsewhere):
    def by_world():
        return elsewhere if threading.current_thread() is threading.main_thread() else on_sim

    assert "rank 0 returns" in _message(by_world, worlds)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"worlds": "sim"}, ValueError, 'worlds must be two, such as ("sim", "gloo"); got \'sim\''),
        ({"worlds": ("sim",)}, ValueError, "worlds must be two"),
        ({"worlds": ("sim", "glo")}, ValueError, "worlds must name some of gloo, mpi, nccl, ray, sim; got 'glo'"),
        ({"worlds": ("gloo", "sim")}, ValueError, "in this order; got ('gloo', 'sim')"),
        ({"worlds": ("sim", "sim")}, ValueError, "one of processes"),
        ({"worlds": ("sim", 4)}, TypeError, "worlds must be names or worlds, as get_world returns them; got 4"),
        ({"world_size": 0}, ValueError, "world_size"),
    ],
)
def test_wrong_arguments_are_told(change, error, says):
    with pytest.raises(error) as caught:
        check_same_on_worlds(lambda: 1, **({"world_size": 2} | change))
    assert says in str(caught.value)


def test_what_is_no_function_is_told():
    with pytest.raises(TypeError, match="check_same_on_worlds needs a function, got 3"):
        check_same_on_worlds(3, world_size=2)
