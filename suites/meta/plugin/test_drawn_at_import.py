"""Numbers that test files draw at import: different on each rank, equal in a replay, with a warning on sim."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from pdlcheck.harness.collection import drawn_at_import

from ..conftest import HEAD
from . import drawn_by_modules

SHOWN = ("-W", "default")  # inner runs share this process, where warnings are errors
DRAWS = {
    "torch": "X = torch.rand(2).tolist()",
    "numpy.random": "X = numpy.random.rand(2).tolist()",
    "random": "X = random.random()",
    "torch by a model": "X = torch.nn.Linear(2, 1)",
    "torch by a parameter": "X = pytest.mark.parametrize('p', [torch.rand(1)])",
}
SEEDED = {  # a stream that one file has seeded stays seeded in later files
    "own generators": "X = torch.rand(2, generator=torch.Generator().manual_seed(1)), "
    "numpy.random.default_rng(1).random(), random.Random(1).random()",
    "forked": "with torch.random.fork_rng():\n    torch.manual_seed(3)\n    X = torch.rand(1)",
    "nothing": "X = torch.zeros(2)",
    "later": "def X(): return torch.rand(2)",
    "seeded by a state": "torch.set_rng_state(torch.Generator().manual_seed(3).get_state())\nX = torch.rand(1)",
    "seeded": "torch.manual_seed(1), numpy.random.seed(1), random.seed(1)\n"
    "X = torch.rand(2), numpy.random.rand(), random.random()",
}
BODY = "\n@W\ndef test_one(rank): dist.barrier()\n@W\ndef test_two(rank): dist.barrier()\n"

WRITES = """
import json, pathlib
X = torch.rand(2).tolist(), numpy.random.rand(), random.random()

@W
def test_it(rank):
    values = [None, None]
    dist.all_gather_object(values, X)
    if rank == 0:
        with open(os.environ["WRITTEN"], "a") as file:
            file.write(json.dumps(values) + "\\n")

@W
def test_that_fails(rank):
    os._exit(3)

@W
def test_on_new_ranks(rank):
    test_it(rank)
"""


@pytest.fixture(autouse=True)
def streams_as_in_a_new_process(monkeypatch):
    """Reset streams that earlier tests may have seeded, because the inner runs share this process."""
    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    torch.seed(), random.seed()
    numpy.random.set_state(numpy.random.RandomState().get_state())  # its seed() would keep the position in the state
    monkeypatch.setattr(drawn_at_import, "_began", random.getstate())
    yield
    random.setstate(before[0])
    numpy.random.set_state(before[1])
    torch.set_rng_state(before[2])


def beside(pytester, sources):
    """Write test files, which are collected in this order."""
    for number, source in enumerate(sources):
        pytester.makepyfile(**{f"test_{number}": f"{HEAD}{source}\n{BODY}"})


def test_simulated_ranks_that_share_what_a_file_drew_are_warned_of_once_a_file(run, pytester):
    beside(pytester, DRAWS.values())
    result = run("", *SHOWN, world="sim")
    result.assert_outcomes(passed=10, warnings=5)
    for number, name in enumerate(DRAWS):
        stream = name.partition(" ")[0]
        cure = "torch.manual_seed(0)" if stream == "torch" else f"{stream}.seed(0)"
        words = f"UnseededImportWarning: test_{number}.py draws from {stream} when it is imported"
        result.stdout.fnmatch_lines([f"*{words}*Seed it first ({cure})*"])


def test_files_that_draw_from_a_seed_or_later_are_not_warned_of(run, pytester):
    beside(pytester, SEEDED.values())
    run("", "-W", "error", world="sim").assert_outcomes(passed=12)


@pytest.mark.parametrize("where", ["conftest", "helper"])
@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_seed_of_another_file_holds_on_all_ranks(run, world, where):
    seeds = "import torch, numpy, random\ntorch.manual_seed(5), numpy.random.seed(5), random.seed(5)\n"
    source = drawn_by_modules.SEEDED.replace(seeds.splitlines()[1], "import helper")
    files = {"helper": seeds if where == "helper" else "", "conftest": seeds if where == "conftest" else ""}
    result = run(source, "-W", "error", world=world, **files)
    result.assert_outcomes(passed=1)


def test_a_file_without_ranks_is_left_alone(run, pytester):
    pytester.makepyfile(
        test_other="import random, pathlib\nX = random.random()\n"
        "def test_it():\n    with pathlib.Path('drawn').open('a') as file: file.write(f'{X}\\n')"
    )
    for _ in range(2):
        run("X = random.random()\n" + BODY, "test_other.py", world="sim").assert_outcomes(passed=1)
    one, two = (pytester.path / "drawn").read_text().split()
    assert one != two, "a guest's numbers differ in every session, as without the plugin"


def test_ranks_draw_the_same_again_whatever_was_imported_before_and_others_by_another_seed(run, pytester, monkeypatch):
    written = pytester.path / "written"
    monkeypatch.setenv("WRITTEN", str(written))
    pytester.makepyfile(test_before=f"{HEAD}torch.rand(7)\n@W\ndef test_b(rank): pass")
    run(WRITES, "-k", "not before")
    run(WRITES)
    run(WRITES, "--isolation", "fresh")
    run(WRITES, "--pdl-seed", "1")
    lines = written.read_text().split("\n")[:-1]
    assert len(lines) == 8  # in each run one line by the first ranks and one by their successors
    assert len(set(lines[:6])) == 1
    assert len(set(lines)) == 2


def test_simulated_ranks_have_what_the_replay_has(run, pytester, monkeypatch):
    written = pytester.path / "written"
    monkeypatch.setenv("WRITTEN", str(written))
    for options in ((), ("--pdl-seed=0",), ("--pdl-seed=1",)):
        run(WRITES, *options, *SHOWN, "-k", "test_it", world="sim").assert_outcomes(passed=1, deselected=2, warnings=1)
    one, two, other = written.read_text().splitlines()
    assert one == two != other


def test_a_failure_on_processes_says_that_values_differ_and_how_to_have_them_again(run):
    source = "X = torch.rand(1)\ndef drawn(): return X.item()\n"
    source += "def test_it(world): assert world.run(drawn, world_size=2) == [X.item()] * 2\n"
    result = run(source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*drawn at import*",
            "test_inner.py draws from torch when it is imported, or a module that it imports does, *",
            "The values of its globals and parameters differ between the ranks, and between them and the controller, *",
            "--pdl-seed=0 draws the same values again. *torch.manual_seed(0)*",
            "*replay*",
        ]
    )
    result = run(source.replace("X =", "torch.manual_seed(1)\nX ="))
    result.assert_outcomes(passed=1)
    result = run("def test_it(world): assert not world.run(dist.get_rank, world_size=2)")
    assert "drawn at import" not in result.stdout.str()


def test_ids_that_each_process_draws_for_itself(run):
    source = "".join(
        f"@W\n@pytest.mark.parametrize('x', [random.random()])\ndef test_{name}(rank, x): pass\n" for name in "ab"
    )
    result = run(source)
    result.assert_outcomes(errors=2)
    words = ", but test_inner.py::test_{}*; the file draws from random when it is imported, *seed first, or give ids*"
    result.stdout.fnmatch_lines([f"*{words.format('a')}", f"*{words.format('b')}"])


def test_ids_that_each_process_makes_of_something_else(run):
    source = "import uuid\n@W\n@pytest.mark.parametrize('x', [str(uuid.uuid4())]{})\ndef test_it(rank, x): pass\n"
    result = run(source.format(""))
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [
            "E   LookupError: * found no test_inner.py::test_it[[]gloo-2-*], but test_inner.py::test_it[[]gloo-2-*]; "
            "test names and ids must be the same in every process, and times, * are not: give ids to the parameters"
        ]
    )
    assert "draws from" not in result.stdout.str()
    run(source.format(", ids=['x']")).assert_outcomes(passed=1)


@pytest.mark.parametrize("draws", ["random.random()", "numpy.random.rand()"])
def test_what_pytest_randomly_has_seeded_the_user_has_not(run, monkeypatch, draws):
    monkeypatch.delenv("PYTEST_ADDOPTS")  # it disables this plugin for the other tests
    options = (*SHOWN, "--randomly-seed=3")
    run(f"{draws}\n@W\ndef test_it(): pass\n", *options, world="sim").assert_outcomes(passed=1, warnings=1)
    seeded = f"random.seed(4), numpy.random.seed(4)\n{draws}\n@W\ndef test_it(): pass\n"
    run(seeded, *options, world="sim").assert_outcomes(passed=1)


OWN = """
import helper
from helper import NET, OPTIMIZER
CONSTANT = 3
X = torch.rand(3)
Y = [random.random(), {"a": numpy.random.rand()}, (1, random.random())]
SEEDED = torch.rand(3, generator=torch.Generator().manual_seed(1))

def differ(value):
    values = [None, None]
    dist.all_gather_object(values, value)
    return values[0] != values[1]

@W
@pytest.mark.parametrize("again", [False, True])
def test_it(rank, again):
    assert all(own is held for own, held in zip(NET.parameters(), OPTIMIZER.param_groups[0]["params"], strict=True))
    assert helper.NET is NET and not differ((CONSTANT, SEEDED.tolist(), NET.training))
    drawn = [X.tolist(), *Y, NET.weight.tolist(), NET.bias.tolist()]
    with open(os.environ["WRITTEN"], "a") as file:
        file.write(f"{drawn[1:4]}\\n")
    assert [differ(value) for value in drawn] == [True] * 6
    with torch.no_grad():
        NET.weight.zero_()
"""
HELPER = "import torch\nNET = torch.nn.Linear(2, 1)\nOPTIMIZER = torch.optim.SGD(NET.parameters(), lr=0.1)\n"


def test_simulated_ranks_draw_for_themselves_in_modules_of_their_own(run, pytester, monkeypatch):
    written = pytester.path / "written"
    monkeypatch.setenv("WRITTEN", str(written))
    own = ("-o", "pdlcheck_own_globals=test_inner helper")
    run(OWN, *own, "-W", "error", world="sim", helper=HELPER).assert_outcomes(passed=2)
    simulated = sorted(set(written.read_text().splitlines()))
    assert len(simulated) == 2
    written.unlink()
    run(OWN, "-k", "False", helper=HELPER).assert_outcomes(passed=1, deselected=1)
    assert sorted(written.read_text().splitlines()) == simulated, "processes draw the same"
    run(OWN, *SHOWN, world="sim", helper=HELPER).assert_outcomes(failed=2, warnings=1)


def test_a_module_that_cannot_run_again_is_shared_with_a_warning(run):
    helper = "import torch\nopen('ran', 'x').close()\nX = torch.rand(1)\n"
    source = "import helper\n@W\ndef test_it(rank): dist.barrier()\n"
    result = run(source, *SHOWN, "-o", "pdlcheck_own_globals=helper", world="sim", helper=helper)
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*simulated ranks share what helper draws at import, because its code fails *"])


def test_a_module_that_a_rank_imports_itself_draws_from_the_ranks_own_stream(run):
    helper = "import torch\nX = torch.rand(3).tolist()\n"
    source = """
import runpy
def differ(value):
    others = [None, None]
    dist.all_gather_object(others, value)
    return others[0] != others[1]

@W
def test_it(rank):
    assert differ(runpy.run_path("helper.py")["X"])
"""
    for world in ("sim", "gloo"):
        run(source, "-W", "error", world=world, helper=helper).assert_outcomes(passed=1)


CONTROLLED = """
X = torch.rand(2)

def uses():
    return helps()

def helps():
    return [X.sum() for _ in range(2)]

def takes(x):
    return x.sum()

def test_that_uses_it(world):
    world.run(uses, world_size=2)

def test_that_uses_it_again(world):
    world.run(uses, world_size=2)

def test_that_passes_it(world):
    world.run(takes, X, world_size=2)

def test_on_one_rank(world):
    world.run(lambda: X.sum(), world_size=1)
"""


def test_a_function_that_uses_what_its_file_drew_is_warned_of_and_one_that_is_given_it_is_not(run):
    result = run(CONTROLLED, *SHOWN, world="sim")
    result.assert_outcomes(passed=4, warnings=1)
    result.stdout.fnmatch_lines(["*test_inner.py draws from torch when it is imported*; uses uses X of it, which *"])
    run("torch.manual_seed(0)\n" + CONTROLLED, "-W", "error", world="sim").assert_outcomes(passed=4)


@pytest.mark.parametrize("options", [(), ("--isolation", "fresh")], ids=["pool", "fresh"])
def test_parameters_in_the_order_of_a_set_are_told_on_processes(run, options):
    result = run(drawn_by_modules.IN_ORDERS_OF_THEIR_OWN, "-rA", *options)
    text = result.stdout.str()
    for well in ("test_names", "test_list"):
        assert f"PASSED test_inner.py::{well}" in text
        assert f"FAILED test_inner.py::{well}" not in text
    assert "config is Config(name='" in text
    assert "parametrize over a list or sorted(...), not over a set, or set PYTHONHASHSEED" in text
    assert "AssertionError" not in text, "no body runs with other parameters on each rank"
