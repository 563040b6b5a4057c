"""A session on sim and gloo: the report of a test that passes on only one names the shared globals behind it."""

from __future__ import annotations

import re
import sys

import pytest

from pdlcheck.item_runners.simulated.world_disagreement import compares_worlds

from ..simulated import shared_globals

pytestmark = pytest.mark.usefixtures("only_this_file")
CURE = "pdlcheck_own_globals = train, in an ini file, makes it so in every run."

ON_GLOO = {  # results of the ranks on processes
    "counter": [3, 3],
    "cached": [[0], [1]],
    "singleton": [[0.0, 0.0], [1.0, 1.0]],
    "class_attribute": [1, 1],
    "lru_cached": [["shard", 0], ["shard", 1]],
    "mutable_default": [[0, -1], [1, -1]],
    "appended_by_one": [1, 0],
    "rebound": [10, 0],
}
OF_RIGHT_TWINS = ON_GLOO | {"mutable_default": [[-1], [-1]], "appended_by_one": [1, 1], "rebound": [10, 10]}
INNOCENT = [(program.__name__, None) for program in shared_globals.INNOCENT]


@pytest.mark.slow
def test_each_broken_program_is_explained_and_no_twin_and_no_innocent(run_on_both):
    broken = [(program.__name__, ON_GLOO[program.__name__]) for program, _, _ in shared_globals.BROKEN]
    twins = [(twin.__name__, OF_RIGHT_TWINS[program.__name__]) for program, _, twin in shared_globals.BROKEN]
    result, sections = run_on_both(
        f"""
CASES = [pytest.param(*case, id=case[0]) for case in {broken + twins + INNOCENT}]

@pytest.mark.world_size(2)
@pytest.mark.parametrize(("name", "expected"), CASES)
def test(rank, name, expected):
    found = getattr(train, name)()
    if expected is not None:
        assert (found.tolist() if isinstance(found, torch.Tensor) else found) == expected[rank]
"""
    )
    result.assert_outcomes(failed=8, passed=8 + 2 * 8 + 2 * len(INNOCENT))
    assert set(sections) == {f"test[sim-2-{name}]" for name in ON_GLOO}
    for program, blamed, _ in shared_globals.BROKEN:
        text = sections[f"test[sim-2-{program.__name__}]"]
        assert text.startswith(
            "fails on sim, passes on gloo: simulated ranks share module globals.\n"
            "With globals of its own for each rank it passes on sim too\n"
            f"  {blamed}, train.py:"
        )
        assert text.splitlines()[3:] == [CURE], f"another global is blamed:\n{text}"


def test_what_passes_on_sim_alone_shows_the_failure_of_the_ranks_own_globals(run_on_both):
    result, sections = run_on_both(
        """
@pytest.mark.world_size(2)
def test_told_by_a_global(rank):
    assert train.appended_by_one() == 1
"""
    )
    result.assert_outcomes(failed=1, passed=1)
    assert re.fullmatch(
        "passes on sim, fails on gloo: simulated ranks share module globals.\n"
        "With globals of its own for each rank it fails on sim too: assert 0 == 1\n"
        rf"  train.seen  list, changed by rank 0, train.py:\d+\n{CURE}",
        sections["test_told_by_a_global[gloo-2]"],
    )


def test_the_caller_of_world_run_has_globals_of_its_own_too(run_on_both):
    result, sections = run_on_both(
        """
seen = []

def look():
    return len(seen)

def test_set_by_the_caller(world):
    seen[:] = [1]
    assert world.run(look, world_size=2) == [1, 1]

def test_seen_by_a_function_that_travels_by_value(world):
    seen[:] = [1, 2]
    assert world.run(lambda: len(seen), world_size=2) == [2, 2]

def count():
    train.step_count += 1
    dist.barrier()
    return train.step_count

def test_counted_beside_what_travels(world):
    seen[:] = [1, 2]
    assert world.run(lambda: (len(seen), count()), world_size=2) == [(2, 1)] * 2

def put():
    train.seen.append(1)

def test_read_by_the_caller(world):
    train.seen.clear()
    world.run(put, world_size=2)
    assert train.seen == []

def test_collected_in_a_closure(world):
    ranks = []
    world.run(lambda: ranks.append(dist.get_rank()), world_size=2)
    assert sorted(ranks) == [0, 1]
"""
    )
    result.assert_outcomes(failed=4, passed=6)
    assert len(sections) == 4
    counted = sections["test_counted_beside_what_travels[sim]"].splitlines()
    assert counted[2].startswith("  train.step_count  int, changed by ranks 0 and 1, ")
    assert counted[3:] == [CURE]
    assert "  train.seen  list, changed by ranks 0 and 1, " in sections["test_read_by_the_caller[sim]"]
    own = "test_the_caller_of_world_run_has_globals_of_its_own_too"
    by_caller = sections["test_set_by_the_caller[gloo]"].splitlines()
    assert by_caller[2].startswith(f"  {own}.seen  list, changed by the caller of world.run, ")
    assert by_caller[3].startswith("What the caller of world.run sets in a module, processes do not see: set it in the")
    assert sum("processes do not see" in text for text in sections.values()) == 1
    closure = sections["test_collected_in_a_closure[gloo]"]
    assert closure.startswith("passes on sim, fails on gloo: simulated ranks share closures.")
    assert f"  {own}.test_collected_in_a_closure's ranks  list, changed by ranks 0 and 1, " in closure


def test_a_difference_of_another_kind_is_not_put_on_globals(run_on_both):
    result, sections = run_on_both(
        """
@pytest.mark.world_size(2)
def test_other(request, rank):
    train.step_count += 1
    assert threading.current_thread() is not threading.main_thread()


@pytest.mark.world_size(2)
def test_on_processes_alone(request, rank):
    train.step_count += 1
    assert threading.current_thread() is threading.main_thread()


drawn, seeded = torch.from_numpy(numpy.random.rand(3)), torch.randn(3)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("imported", ["drawn", "seeded"])
def test_alike_on_all_ranks(imported):
    mine = globals()[imported]
    of_rank_0 = mine.clone()
    dist.broadcast(of_rank_0, 0)
    assert torch.equal(of_rank_0, mine)
""",
        *("-W", "ignore::pdlcheck.errors.UnseededImportWarning"),
        fresh=True,  # because other tests of this process seed the streams
    )
    result.assert_outcomes(failed=3, passed=5)
    other = (
        "and not because simulated ranks share globals of your modules, as far as those can be told apart.\n"
        "Those of installed packages were not looked at: where one keeps its rank or its groups in a module, "
        "pdlcheck_own_globals = its.module, in an ini file, gives each rank its own."
    )
    imported = "What an import draws from torch, numpy or random, unseeded, is one on sim; each process draws its own."
    assert sections == {
        "test_other[gloo-2]": f"passes on sim, fails on gloo, {other}\n{imported}",
        "test_on_processes_alone[sim-2]": f"fails on sim, passes on gloo, {other}",
        "test_alike_on_all_ranks[gloo-2-drawn]": "passes on sim, fails on gloo: simulated ranks share module globals.\n"
        "With globals of its own for each rank it fails on sim too: assert False\n"
        "pdlcheck_own_globals = test_a_difference_of_another_kind_is_not_put_on_globals, in an ini file, makes it so "
        "in every run.",
    }


@pytest.mark.filterwarnings("ignore::pdlcheck.errors.SetOrderWarning")
def test_a_loop_over_a_set_is_named(run_on_both):
    loop = """
@pytest.mark.world_size(2)
def test_it(rank):
    sums = {}
    for name in NAMES:
        sums[name] = torch.tensor(len(name))
        dist.all_reduce(sums[name])
    assert sums == {name: 2 * len(name) for name in NAMES}
"""
    names = "{'a', 'bb', 'ccc', 'dddd', 'eeeee', 'ffffff', 'ggggggg'}"
    _, sections = run_on_both(f"NAMES = {names}\n{loop}")
    assert sections["test_it[gloo-2]"].splitlines()[1:] == [
        "Simulated ranks share the order of a set; each process has its own. Loop over sorted(...) or a list:",
        "  ranks post all_reduce in the order of a set: `for name in NAMES` at test_a_loop_over_a_set_is_named.py:7",
    ]
    _, sections = run_on_both(f"NAMES = sorted({names})\n{loop}")
    assert sections == {}


def test_what_an_earlier_test_left_is_told(run_on_both):
    result, sections = run_on_both(
        """
def test_first():
    train.limit = 7

@pytest.mark.world_size(2)
def test_second(rank):
    assert train.limit == 0
"""
    )
    result.assert_outcomes(failed=1, passed=2)
    assert sections == {
        "test_second[sim-2]": "fails on sim, passes on gloo; but passes on sim too when it runs alone: a test before "
        "it has changed what it uses."
    }


def test_fixtures_are_set_up_again_and_the_modules_are_left_as_they_were(run_on_both):
    result, sections = run_on_both(
        """
@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")

@pytest.fixture
def start(rank):
    train.limit = 100
    yield 1
    assert train.limit == 100

@pytest.mark.world_size(2)
def test_counts(start, folder, capsys, tmp_path):
    train.step_count += start
    dist.barrier()
    assert folder.exists() and train.limit == 100 and tmp_path.exists()
    assert train.step_count == 1
"""
    )
    result.assert_outcomes(failed=1, passed=1)
    assert "train.step_count  int, changed by ranks 0 and 1" in sections["test_counts[sim-2]"]


def test_an_object_that_refuses_is_no_error_of_the_session(run_on_both):
    result, sections = run_on_both(
        """
class Sealed(int):
    def __eq__(self, other):
        raise TypeError("sealed")
    __hash__ = int.__hash__

level = Sealed(0)

@pytest.mark.world_size(2)
def test_counts(rank):
    global level
    level = Sealed(level + 1)
    dist.barrier()
    assert int(level) == 1
"""
    )
    result.assert_outcomes(failed=1, passed=1)
    assert sections == {
        "test_counts[sim-2]": "fails on sim, passes on gloo; whether that comes from module globals was not found out: "
        "TypeError: sealed"
    }


def test_only_so_many_tests_run_again(run_on_both, monkeypatch):
    monkeypatch.setattr("pdlcheck.item_runners.simulated.world_disagreement._AT_MOST", 1)
    _, sections = run_on_both(
        """
@pytest.mark.world_size(2)
@pytest.mark.parametrize("number", [1, 2])
def test(number):
    assert train.counter() == 3 * number
"""
    )
    assert "train.step_count" in sections["test[sim-2-1]"]
    assert sections["test[sim-2-2]"].endswith("not found out: 1 tests before it ran again, and no more do")


def test_a_session_that_is_to_end_ends(run_on_both):
    result, sections = run_on_both(
        """
@pytest.mark.world_size(2)
def test_counts(rank):
    assert train.counter() == 3

def test_last():
    pytest.exit("enough")
"""
    )
    result.stdout.fnmatch_lines(["*_pytest.outcomes.Exit: enough*"])
    assert sections == {}


def test_modules_that_cannot_be_read_are_no_error_of_the_session(run_on_both):
    _, sections = run_on_both(
        """
class Sealed:
    def __getattribute__(self, name):
        raise OSError("sealed")

sealed = Sealed()

@pytest.mark.world_size(2)
def test_counts(rank):
    assert train.counter() == 3
"""
    )
    assert sections["test_counts[sim-2]"].endswith("was not found out: OSError: sealed")


@pytest.mark.parametrize(
    ("options", "compares"),
    [
        (["--world", "sim,gloo"], True),
        (["--world", "gloo,sim"], True),
        (["--world", "sim"], False),
        (["--world", "gloo,mpi"], False),
        (["--world", "sim,gloo", "-n", "2"], False),
        (["--world", "sim,gloo", "--pdb"], False),
        (["--world", "sim,gloo", "--rank-pdb", "0"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_worlds_are_compared_where_one_process_sees_both(pytester, options, compares):
    assert compares_worlds(pytester.parseconfig(*options)) == compares


@pytest.mark.parametrize(
    ("options", "worlds"), [([], "sim"), (["--co"], "sim,gloo")], ids=["one world", "only collected"]
)
def test_nothing_is_looked_at_where_nothing_can_be_compared(run_on_both, monkeypatch, options, worlds):
    from pdlcheck.worlds.simulated.module_globals import run as own_globals

    monkeypatch.setattr(own_globals, "UserState", None)
    test = "@pytest.mark.world_size(2)\ndef test(rank):\n    assert rank < 2\n"
    result, sections = run_on_both(test, *options, worlds=worlds)
    assert sections == {}
    assert result.ret == 0


def test_expected_failures_and_skips_are_no_verdicts_to_compare(run_on_both):
    result, sections = run_on_both(
        """
@pytest.mark.world_size(2)
def test_skipped(rank):
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("not here")
    assert train.seen

@pytest.mark.xfail
@pytest.mark.world_size(2)
def test_expected(rank):
    assert train.appended_by_one() == 1
"""
    )
    result.assert_outcomes(failed=1, skipped=1, xfailed=1, xpassed=1)
    assert sections == {}


def test_what_cannot_be_sent_is_not_put_on_globals(run_on_both):
    result, sections = run_on_both(
        """
def test_result(world):
    world.run(lambda: threading.Lock(), world_size=2)
"""
    )
    result.assert_outcomes(failed=1, passed=1)
    assert sections == {
        "test_result[gloo]": "passes on sim, fails on gloo: functions, what they enclose, and results are sent to and "
        "from processes, simulated ranks have them as they are."
    }


def test_what_the_failure_itself_explains_is_not_put_on_globals(run_on_both):
    result, sections = run_on_both(
        """
import signal


@pytest.mark.world_size(2)
def test_handler(rank):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
"""
    )
    result.assert_outcomes(failed=1, passed=1)
    assert sections == {}


def test_a_module_that_reads_its_rank_when_it_is_imported_is_named(run_on_both):
    result, sections = run_on_both(
        """
import os

RANK = int(os.getenv("RANK", "-1"))


@pytest.mark.world_size(2)
def test_told_by_a_global(rank):
    assert rank == RANK


@pytest.mark.world_size(2)
def test_told_by_a_function(rank):
    assert rank == int(os.environ["RANK"])
""",
        "-Wignore:simulated ranks share what a module makes",
    )
    result.assert_outcomes(failed=1, passed=3)
    own = "test_a_module_that_reads_its_rank_when_it_is_imported_is_named"
    assert sections == {
        "test_told_by_a_global[sim-2]": "fails on sim, passes on gloo. What modules make of a launcher's variables "
        "when they are imported,\nsimulated ranks share as the controller made it, where no rank is set; each process "
        f"makes its own:\n  {own}.RANK is made of RANK at {own}.py:5\n"
        "Read in a function, they are each rank's own in every world."
    }


STATE = "rank = None"
CHECK = """
import torch.distributed as dist
from framework import state

def start():
    state.rank = dist.get_rank()
    dist.barrier()

def step():
    if state.rank != dist.get_rank():
        raise RuntimeError(f"inconsistent ranks: {state.rank} and {dist.get_rank()}")
"""


@pytest.fixture
def framework(pytester, monkeypatch):
    """Install a package that keeps its rank in a module."""
    folder = pytester.path / "site-packages" / "framework"
    folder.mkdir(parents=True)
    for name, text in {"__init__": "", "state": STATE, "check": CHECK}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder.parent)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "framework"]:
        del sys.modules[name]


def test_where_a_frameworks_own_check_fails_its_modules_are_tried(run_on_both, framework):
    result, sections = run_on_both(
        """
from framework import check

@pytest.mark.world_size(2)
def test_starts(rank):
    check.start()
    check.step()

@pytest.mark.world_size(2)
def test_is_wrong_everywhere():
    check.start()
    check.state.rank = 7
    check.step()
"""
    )
    result.assert_outcomes(failed=3, passed=1)
    assert sections == {
        "test_starts[sim-2]": "fails on sim, passes on gloo: simulated ranks share module globals.\n"
        "With globals of its own for each rank it passes on sim too\n"
        "pdlcheck_own_globals = framework.state, in an ini file, makes it so in every run."
    }
