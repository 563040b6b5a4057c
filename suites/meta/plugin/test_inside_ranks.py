"""Ranks start no processes for ranks, and simulated ranks no simulated ones; a file that they import may start some."""

from __future__ import annotations

import pytest

from ..conftest import HEAD
from ..needs_mpi import needs_mpi

SOURCE = """
from pdlcheck.worlds import get_world

KNOWN = get_world("sim").run(dist.get_rank, world_size=3)

@W
def test_fixture(world, rank): world.run(dist.get_rank, world_size=2)

@W
def test_own_world(rank): get_world("gloo").run(dist.get_rank, world_size=2)

@pytest.fixture
def reference(world): return world.run(dist.get_rank, world_size=2)

@W
def test_in_a_fixture(reference): pass

def nested(): return get_world(KIND).run(dist.get_rank, world_size=2)

def test_function(world): world.run(nested, world_size=2)

@W
def test_simulates(rank, world):
    if KIND != "sim":
        assert get_world("sim").run(dist.get_rank, world_size=3) == [0, 1, 2]

@W
def test_knows(rank): assert KNOWN == [0, 1, 2]

def test_controller(world):
    assert world.run(dist.get_rank, world_size=2) == [0, 1]
    assert nested() == [0, 1]
"""


@pytest.mark.slow
@pytest.mark.parametrize("world", ["sim", "gloo", pytest.param("mpi", marks=needs_mpi)])
def test_world_run_is_refused_in_ranks(pytester, world):
    pytester.makepyfile(test_inner=f"{HEAD}\nKIND = {world!r}\n{SOURCE}")
    result = pytester.runpytest_subprocess("--world", world, "-p", "no:randomly", timeout=100)
    result.assert_outcomes(passed=3, failed=3, errors=1)
    text = (
        "RuntimeError: world.run was called inside a * the marker world_size runs on every rank; remove the marker, *"
    )
    result.stdout.fnmatch_lines([f"E  *{text}"] * 4)


@pytest.mark.slow
@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_pytest_that_a_rank_starts_is_no_member_of_a_launch(run, world):
    result = run(
        """
import subprocess

INNER = "import pytest\\n@pytest.mark.world_size(2)\\ndef test_inner(rank): pass\\n"

@pytest.mark.timeout(60)
@pytest.mark.world_size(2)
def test_runs_pytest(rank, tmp_path):
    (tmp_path / "test_inner.py").write_text(INNER)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "1 on sim" in done.stdout
""",
        world=world,
    )
    result.assert_outcomes(passed=1)
