"""A package offers a world by an entry point: its name works in ``--world``, in test ids and in ``get_world``."""

from __future__ import annotations

import pytest

PACKAGE = """
import os, subprocess, sys

from pdlcheck.worlds.remote import RemoteWorld


def start(rank, variables):
    program = [sys.executable, "-m", "pdlcheck.worlds.remote"]
    return subprocess.Popen(program, env={**os.environ, **variables, "WORLD_OF_MINE": "yes"})


def make(**options):
    return RemoteWorld("mine", start, host="127.0.0.1", **options)
"""
TEST = """
import os, pytest, torch, torch.distributed as dist

@pytest.mark.world_size(2)
def test_sum(rank):
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    assert x.item() == 3 and os.environ.get("WORLD_OF_MINE") == "yes"

@pytest.mark.world_size(2)
def test_wrong_on_rank_1(rank):
    assert rank == 0

def test_called(world):
    assert world.name == "mine" and world.run(dist.get_rank, world_size=2) == [0, 1]
"""


@pytest.fixture
def installed(pytester, monkeypatch):
    """Return a function that installs a package ``mine`` for the processes that the test starts."""

    def install(source=PACKAGE, entry="mine_world:make", name="mine"):
        folder = pytester.mkdir("site")
        (folder / "mine_world.py").write_text(source)
        about = folder / "mine-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine-worlds\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[pdlcheck.worlds]\n{name} = {entry}\n")
        monkeypatch.setenv("PYTHONPATH", str(folder))

    return install


def test_a_test_runs_on_the_world_of_a_package(pytester, installed):
    installed()
    pytester.makepyfile(test_mine=TEST)
    result = pytester.runpytest_subprocess("--world", "mine", "-v")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*test_sum?mine-2? PASSED*", "*test_wrong_on_rank_1?mine-2? FAILED*"])
    result.stdout.fnmatch_lines(["*rank = 1*", "*tests that ran on ranks: 3 on mine"])


@pytest.mark.slow
def test_torchs_tests_pass_on_the_world_of_a_package(pytester, installed):
    pytest.importorskip("expecttest", reason="torch's tests need expecttest: pip install 'pdlcheck[dev]'")
    from ..conformance import test_conformance

    installed()
    result = pytester.runpytest_subprocess(
        str(test_conformance.TESTS), "--world", "mine", "-q", "-p", "no:cacheprovider", timeout=900
    )
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] >= 90, result.stdout.str()
    assert not outcomes.keys() & {"failed", "errors"}, result.stdout.str()


def test_a_world_that_is_not_installed_is_named_with_those_that_are(pytester, installed):
    installed()
    pytester.makepyfile(test_mine=TEST)
    result = pytester.runpytest_subprocess("--world", "mime")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--world must name some of gloo, mine, mpi, nccl, ray, sim; got 'mime'"])


@pytest.mark.slow
def test_a_world_whose_module_fails_skips_its_tests_and_says_why(pytester, installed):
    installed("import missing_library\n")
    pytester.makepyfile(test_mine=TEST)
    result = pytester.runpytest_subprocess("--world", "mine", "-rs")
    result.assert_outcomes(skipped=3)
    result.stdout.fnmatch_lines(
        ["*world mine of mine-worlds cannot be imported: ModuleNotFoundError: No module named 'missing_library'"]
    )


@pytest.mark.slow
def test_a_package_cannot_take_the_name_of_a_world_of_pdlcheck(pytester, installed):
    installed("raise RuntimeError('imported')", name="sim")
    pytester.makepyfile(test_mine=TEST.replace('"mine"', '"sim"'))
    result = pytester.runpytest_subprocess("--world", "sim", "-k", "called")
    result.assert_outcomes(passed=1, deselected=2)
