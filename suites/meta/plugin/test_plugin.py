"""The pytest plugin from outside: files as a user writes them, run in their own pytest session on both worlds."""

from __future__ import annotations

import pytest

# Inner runs forget the modules that they import, so modules with state must be imported before.
import pdlcheck.harness.collection.gpu
import pdlcheck.harness.collection.subjects
import pdlcheck.item_runners.processes.items
import pdlcheck.item_runners.simulated.items
import pdlcheck.primitives.pagerank  # noqa: F401
from pdlcheck.worlds.choices import SEMANTICS
from pdlcheck.worlds.semantics import PROFILES

WORLDS = ["sim", "gloo"]


@pytest.fixture(params=WORLDS)
def run(request, pytester):
    """Return a function that writes a test file, runs it on one world, and returns the outcome."""

    def run(source, *options):
        pytester.makepyfile(source)
        return pytester.runpytest_inprocess("--world", request.param, "-p", "no:cacheprovider", *options)

    run.world = request.param
    return run


HEAD = """
import pytest, torch, torch.distributed as dist
from hypothesis import given, settings, strategies as st
"""


def test_the_body_runs_on_every_rank_once_for_each_world_size(run):
    result = run(
        HEAD
        + """
@pytest.mark.world_size(2, 3)
def test_sum(rank, world_size, device, group):
    assert dist.get_rank() == rank and dist.get_world_size() == world_size
    assert device == torch.device("cpu") and group.size() == world_size
    x = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(x, group=group)
    assert x.item() == world_size * (world_size + 1) / 2
""",
        "-v",
    )
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines([f"*::test_sum?{run.world}-2? PASSED*", f"*::test_sum?{run.world}-3? PASSED*"])


def test_a_parameter_or_fixture_of_the_users_own_may_be_called_world(run):
    result = run(
        HEAD
        + """
@pytest.mark.parametrize("world", ["sim", "gloo", True])
def test_wrong(world):
    assert world is False

class TestFixture:
    @pytest.fixture(params=["sim", None])
    def world(self, request):
        return request.param

    def test_wrong(self, world):
        assert world is False
""",
        "--timeout=60",
    )
    result.assert_outcomes(failed=5)
    result.stdout.fnmatch_lines(["*assert 'gloo' is False*"])
    result.stdout.no_fnmatch_line("*replay*")
    result.stdout.no_fnmatch_line("*worlds differ*")


def test_the_failing_ranks_own_assertion_is_what_the_user_reads(run):
    result = run(
        HEAD
        + """
@pytest.mark.world_size(2)
def test_wrong(rank):
    total = rank + 41
    dist.barrier()
    assert total == 41
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            ">       assert total == 41",
            "E       assert 42 == 41",
            "*rank 1 of 2 raised this*",
            "pytest *test_wrong?*2?' --world " + run.world + " --pdl-seed=0",
        ]
    )


def test_a_rank_that_raises_does_not_leave_its_peers_waiting(run):
    result = run(
        HEAD
        + """
@pytest.mark.world_size(2)
def test_one_raises(rank):
    if rank == 1:
        raise AssertionError("rank one is unwell")
    dist.all_reduce(torch.ones(3))

@pytest.mark.world_size(2)
def test_after_it(rank):
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2
"""
    )
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["*AssertionError: rank one is unwell*", "*rank 0 was stopped in all_reduce*"])


def test_an_exception_whose_text_cannot_be_made_is_a_failure_like_others(run):
    result = run(
        HEAD
        + """
class Mute(Exception):
    def __str__(self):
        raise KeyError("no words")

@pytest.mark.world_size(2)
def test_one(rank):
    if rank == 1:
        raise Mute
    dist.barrier()

@pytest.mark.world_size(2)
def test_both():
    raise Mute

def fail():
    raise Mute

def test_function(world):
    world.run(fail, world_size=2)
"""
    )
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines([">*raise Mute", "E*Mute*exception str() failed*"])
    text = result.stdout.str()
    assert text.count("<exception str() failed>") >= 3
    assert "no words" not in text.replace('KeyError("no words")', "")
    assert "RankDied" not in text


def test_the_ways_to_end_a_program_are_failures_at_their_line(run):
    result = run(
        HEAD
        + """
import sys

@pytest.mark.world_size(2)
def test_exit(rank):
    sys.exit(3)

@pytest.mark.world_size(2)
def test_generator(rank):
    raise GeneratorExit

@pytest.mark.world_size(2)
@pytest.mark.xfail(raises=SystemExit)
def test_expected(rank):
    sys.exit(3)
""",
        "-rx",
    )
    result.assert_outcomes(failed=2, xfailed=1)
    text = result.stdout.str()
    assert ">       sys.exit(3)" in text
    assert ">       raise GeneratorExit" in text
    assert len(result.outlines) < 60
    assert "_hookexec" not in text


def test_every_rank_has_its_own_function_scoped_fixtures(run):
    result = run(
        HEAD
        + """
made = []

@pytest.fixture
def ten(rank):
    made.append(rank)
    yield 10 * rank
    assert dist.is_initialized()

@pytest.fixture(scope="module")
def shared():
    return 7

@pytest.mark.world_size(2)
@pytest.mark.parametrize("factor", [1, 2], ids=["one", "two"])
def test_fixtures(ten, shared, rank, factor, tmp_path, monkeypatch):
    assert (ten, shared, rank in made) == (10 * rank, 7, True)
    everywhere = [None, None]
    dist.all_gather_object(everywhere, ten * factor)
    assert everywhere == [0, 10 * factor]

@pytest.mark.world_size(2)
class TestClass:
    def setup_method(self):
        self.seen = 0

    def test_method(self, rank):
        self.seen += rank
        dist.barrier()
        assert self.seen == rank
"""
    )
    result.assert_outcomes(passed=3)


def test_fixtures_of_pytest_itself_serve_every_rank(run):
    result = run(
        HEAD
        + """
import logging, os

@pytest.mark.world_size(2)
def test_pytests_own(rank, tmp_path, monkeypatch, capsys, caplog):
    (tmp_path / "mine").write_text(str(rank))
    monkeypatch.setenv(f"OF_{rank}", "yes")
    logging.getLogger("x").warning("logged")
    dist.barrier()
    assert (tmp_path / "mine").read_text() == str(rank)
    assert os.environ[f"OF_{rank}"] == "yes" and "logged" in caplog.text
    print("printed")
    assert "printed" in capsys.readouterr().out

@pytest.mark.world_size(2)
async def test_async(rank):
    pass
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*the body of an async test cannot run on *ranks*"])


def test_what_simulated_ranks_patch_in_any_order_is_undone(run):
    result = run(
        HEAD
        + """
import os

@pytest.mark.world_size(2)
def test_patches(rank, monkeypatch):
    if rank == 0:
        dist.barrier()
    monkeypatch.setenv("PATCHED", str(rank))
    if rank == 1:
        dist.barrier()

@pytest.fixture
def nothing_patched():
    assert "PATCHED" not in os.environ

@pytest.mark.world_size(2)
@pytest.mark.schedules(3)
def test_under_schedules(nothing_patched, rank, monkeypatch):
    monkeypatch.setenv("PATCHED", str(rank))

@pytest.mark.world_size(2)
def test_after(nothing_patched):
    pass
"""
    )
    result.assert_outcomes(passed=3)


def test_skip_xfail_and_errors_in_fixtures_are_what_they_are_on_one_rank(run):
    result = run(
        HEAD
        + """
@pytest.mark.world_size(2)
def test_skip(rank):
    pytest.skip("not today")

@pytest.mark.world_size(2)
@pytest.mark.xfail(strict=True, raises=ZeroDivisionError)
def test_xfail(rank):
    1 / 0

@pytest.fixture
def broken(rank):
    if rank == 1:
        raise OSError("no such disk")

@pytest.mark.world_size(2)
def test_error(broken):
    pass

@pytest.mark.world_size(2)
def test_raises_on_one_rank(rank):
    if rank == 1:
        with pytest.raises(ValueError):
            raise ValueError
    dist.barrier()
""",
        "-rs",
    )
    result.assert_outcomes(skipped=1, xfailed=1, errors=1, passed=1)
    result.stdout.fnmatch_lines(["*OSError: no such disk*", "SKIPPED * not today"])


def test_a_deadlock_is_a_failure_with_a_line_for_each_rank(run):
    result = run(
        HEAD
        + """
@pytest.mark.world_size(2)
def test_ring(rank):
    dist.send(torch.ones(3), 1 - rank)
    dist.recv(torch.zeros(3), 1 - rank)
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*rank 0: blocked in send to rank 1 of float32 (3,), default group (ranks 0, 1), at *.py:6*",
            "*rank 1: blocked in send to rank 0 of float32 (3,), default group (ranks 0, 1), at *.py:6*",
            "*wait cycle: rank 0 -> rank 1 -> rank 0*",
        ]
    )


def test_a_mismatch_is_a_failure_that_shows_both_sides(run):
    result = run(
        HEAD
        + """
@pytest.mark.world_size(2)
def test_shapes(rank):
    dist.all_reduce(torch.ones(3 + rank))
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*CollectiveMismatch*differ in the shape*", "*rank 0: all_reduce(SUM) of float32 (3,)*", "*(4,)*"]
    )


def test_a_test_without_ranks_is_left_alone(pytester):
    pytester.makepyfile("def test_plain():\n    assert 1 + 1 == 2\n")
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_loading_the_plugin_does_not_import_torch(pytester):
    pytester.makepyfile("import sys\ndef test_plain():\n    assert 'torch' not in sys.modules\n")
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:hypothesispytest").assert_outcomes(passed=1)


def test_several_worlds_repeat_a_test_with_an_id_for_each(pytester):
    pytester.makepyfile(
        HEAD + "@pytest.mark.world_size(2)\ndef test_a(rank):\n    dist.barrier()\n\n"
        "def test_b(world):\n    assert world.run(dist.get_rank, world_size=2) == [0, 1]\n"
    )
    result = pytester.runpytest_inprocess("--world", "sim,gloo", "-v", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=4)
    for name in ["test_a[sim-2]", "test_a[gloo-2]", "test_b[sim]", "test_b[gloo]"]:
        assert name in result.stdout.str()


def test_a_marked_test_never_passes_without_ranks(pytester):
    pytester.makepyfile(HEAD + "def test_a(): pass")
    pytester.makeconftest("def pytest_collection_modifyitems(items):\n    items[0].add_marker('world_size')\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    assert result.parseoutcomes().get("passed", 0) == 0
    result.stdout.fnmatch_lines(["*world_size marks test functions, methods*before they are collected"])


def test_doctests_of_a_marked_module_run_as_ever(pytester):
    doctest = 'def one():\n    """\n    >>> one()\n    1\n    """\n    return 1\n\n'
    pytester.makepyfile(HEAD + "pytestmark = pytest.mark.world_size(2)\n\n" + doctest + "def test_a(rank): pass\n")
    pytester.runpytest_inprocess("--doctest-modules", "-p", "no:cacheprovider").assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("options", "source", "message"),
    [
        (["--world", "slurm"], "", "*--world must name some of gloo, mpi, nccl, ray, sim; got 'slurm'*"),
        (["--subject", "x"], "", "*--subject takes NAME=MODULE:FUNCTION; got 'x'*"),
        (
            [],
            "@pytest.mark.world_size(0)\ndef test_a(rank): pass",
            "*world_size takes numbers of ranks from 1 to 10000*got 0*",
        ),
        ([], "def test_a(rank): pass", "*fixture 'rank' belongs to a rank: mark the test with*"),
        ([], "@pytest.mark.verifies('nonsense')\ndef test_a(subject): pass", "*there is no such primitive*"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_cure(pytester, options, source, message):
    pytester.makepyfile(HEAD + source)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)
    assert result.ret != 0
    output = result.stdout.str() + result.stderr.str()
    pytest.LineMatcher(output.splitlines()).fnmatch_lines([message])


def test_a_gpu_test_is_skipped_with_a_reason_and_selected_by_its_marker(pytester):
    pytester.makepyfile(HEAD + "@pytest.mark.gpu\ndef test_g(): torch.ones(1, device='cuda')\n\ndef test_c(): pass\n")
    result = pytester.runpytest_inprocess(*("-m", "gpu", "-rs", "-p", "no:cacheprovider", "-o", "pdlcheck_markers=gpu"))
    assert result.parseoutcomes().get("deselected") == 1
    import torch

    if not torch.cuda.is_available():
        result.assert_outcomes(skipped=1, deselected=1)
        result.stdout.fnmatch_lines(["*needs CUDA: *"])


def test_a_suite_runs_on_the_function_that_the_user_names(pytester):
    pytester.makepyfile(mine="def double(x):\n    return 2 * x\n")
    pytester.makepyfile(
        HEAD
        + """
@pytest.mark.verifies("double")
@settings(database=None, deadline=None, max_examples=5)
@given(x=st.integers())
def test_double(subject, x):
    assert subject(x) == x + x
"""
    )
    result = pytester.runpytest_inprocess("--subject", "double=mine:double", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)


def test_a_test_that_returns_something_passes_with_pytests_warning(run):
    source = """
@pytest.mark.world_size(2)
def test_returns(rank): return rank == 0

@pytest.mark.world_size(2)
def test_returns_nothing(rank): pass
"""
    result = run(HEAD + source, "-W", "default")
    result.assert_outcomes(passed=2)
    assert result.stdout.str().count("PytestReturnNotNoneWarning: ") == 1  # one warning for all ranks
    result.stdout.fnmatch_lines(["*PytestReturnNotNoneWarning: *test_returns[[]*-2] returned <class 'bool'>.*"])
    run(HEAD + source, "-W", "error::pytest.PytestReturnNotNoneWarning").assert_outcomes(passed=1, failed=1)


def test_a_skip_in_a_function_on_ranks_gives_its_reason_alone(run):
    result = run(
        HEAD
        + """
def skips():
    if dist.get_rank() == 0:
        pytest.skip("no such disk")

def test_body(world):
    world.run(skips, world_size=2)

@pytest.fixture
def fixture(world):
    world.run(skips, world_size=2)

def test_with_a_fixture(fixture): pass

def test_of_the_controller(world):
    pytest.skip("without ranks")
""",
        "-rs",
    )
    result.assert_outcomes(skipped=3)
    lines = sorted(line for line in result.outlines if line.startswith("SKIPPED"))
    name = lines[0].split()[2].partition(":")[0]
    places = [("8", "no such disk"), ("15", "no such disk"), ("18", "without ranks")]
    assert lines == sorted(f"SKIPPED [1] {name}:{line}: {reason}" for line, reason in places), lines


def test_the_option_semantics_offers_the_profiles_that_there_are():
    assert sorted(SEMANTICS) == sorted(PROFILES)
