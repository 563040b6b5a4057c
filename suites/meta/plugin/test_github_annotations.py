"""The workflow commands of ``--pdl-github``: one for each failed phase, at its file and line."""

from __future__ import annotations

import pytest

SOURCE = """
import pytest, torch, torch.distributed as dist
from pdlcheck.checks import check_all_reduce

def nothing(tensor):
    tensor *= 1

def test_right(world):
    check_all_reduce(dist.all_reduce, [torch.ones(2)] * 2, world)

def test_wrong(world):
    check_all_reduce(nothing, [torch.ones(2), torch.full((2,), 4.0)], world)

@pytest.mark.world_size(2)
def test_on_ranks(rank):
    assert rank != 1, "100%, of ranks: 1"

@pytest.fixture
def broken():
    raise RuntimeError("no data")

def test_of_a_broken_fixture(broken):
    pass
"""


def commands(result):
    return [line for line in result.stdout.lines if line.startswith("::")]


@pytest.fixture
def tests(pytester):
    folder = pytester.mkdir("tests")
    (folder / "test_inner.py").write_text(SOURCE)
    return pytester


@pytest.mark.parametrize("distributed", [False, True], ids=["alone", "xdist"])
def test_each_failed_phase_is_a_command(tests, monkeypatch, distributed):
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tests.path.parent))
    options = ("-n", "1", "-p", "xdist") if distributed else ()
    run = tests.runpytest_subprocess if distributed else tests.runpytest_inprocess
    result = run("--pdl-github", "--world", "sim", "-p", "no:cacheprovider", *options)
    wrong, on_ranks, broken = commands(result)
    file = f"::error file={tests.path.name}/tests/test_inner.py"
    assert wrong.startswith(f"{file},line=12,title=tests/test_inner.py%3A%3Atest_wrong[sim]::")
    assert "%0A  likely cause    it is this rank's own input" in wrong
    assert on_ranks.startswith(f"{file},line=16,title=tests/test_inner.py%3A%3Atest_on_ranks[sim-2]::")
    assert "100%25, of ranks: 1" in on_ranks
    assert broken == (
        f"{file},line=20,title=tests/test_inner.py%3A%3Atest_of_a_broken_fixture%2C setup::RuntimeError: no data"
    )


def test_nothing_is_printed_without_the_option_or_a_failure(tests, monkeypatch):
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    assert not commands(tests.runpytest_inprocess("--world", "sim", "-k", "wrong"))
    assert not commands(tests.runpytest_inprocess("--world", "sim", "-k", "right", "--pdl-github"))
    (one,) = commands(tests.runpytest_inprocess("--world", "sim", "-k", "wrong", "--pdl-github"))
    assert one.startswith("::error file=tests/test_inner.py,line=12,")
