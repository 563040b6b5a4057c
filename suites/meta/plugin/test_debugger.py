"""`breakpoint()` and `--pdb` on a chosen rank."""

from __future__ import annotations

import os
import re
import sys

import pytest

from ..conftest import HEAD

pexpect = pytest.importorskip("pexpect", reason="a terminal is played by pexpect: pip install 'pdlcheck[dev]'")

DEBUGGED = """
@W
def test_breakpoint(rank):
    mine = 10 + rank
    breakpoint()
    dist.barrier()

@W
def test_post_mortem(rank):
    secret = 111 * rank
    dist.barrier()
    assert rank == 0

def function():
    value = dist.get_rank() + 70
    breakpoint()
    return value

def test_function(world):
    assert world.run(function, world_size=2) == [70, 71]

@W
@pytest.mark.timeout(1)
def test_others_wait(rank):
    if rank == 1:
        patience = "long"
        import pdb; pdb.set_trace()
        assert patience == "gone"
    else:
        raise ValueError("rank 0 fails meanwhile")
"""


@pytest.mark.slow
def test_the_debugger_of_the_controller_says_where_that_of_the_rank_is(pytester):
    pytester.makepyfile(HEAD + "@W\ndef test_one(rank):\n    assert rank != 1\n")
    result = pytester.runpytest_subprocess("--pdb", "--world", "gloo")
    hint = "--pdb is the controller's, without the frames of the ranks: --rank-pdb 1 has them"
    result.stdout.fnmatch_lines([hint, "*entering PDB*", "*1 failed*"])


@pytest.mark.slow
@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_a_debugger_in_the_chosen_rank_has_the_terminal(pytester, world):
    pytester.makepyfile(test_inner=HEAD + DEBUGGED)
    options = ["--color=no", "--world", world, "--rank-pdb=1"]
    if world == "sim":
        options += ["-k", "not others"]
    child = pexpect.spawn(
        sys.executable,
        ["-m", "pytest", *options],
        cwd=pytester.path,
        env=dict(os.environ, PYTHON_COLORS="0", NO_COLOR="1"),
        encoding="utf-8",
        timeout=30,
    )
    seen = []

    def tell(line, answer):
        child.expect(r"\(Pdb[^)]*\) ")
        seen.append(child.before)
        child.sendline(line)
        if answer is not None:
            child.expect_exact(answer)

    tell("p mine * 2", "22")
    tell("continue", None)
    tell("p secret * 2", "222")
    tell("continue", None)
    tell("p value * 2", "142")
    tell("continue", None)
    if world == "gloo":
        tell("p patience * 2", "longlong")
        with pytest.raises(pexpect.TIMEOUT):
            child.expect(r"failed|passed", timeout=2.5)  # neither the limit of 1 s nor the other rank ends this
        tell("patience = 'gone'", None)
        tell("continue", None)
    child.expect(pexpect.EOF)
    seen.append(child.before)
    child.close()
    text = "".join(seen)
    failed, passed = (2, 2) if world == "gloo" else (1, 2)
    assert re.search(rf"{failed} failed, {passed} passed", text), text
    if world == "gloo":
        assert ">>> rank 1 at a breakpoint" in text
        assert ">>> rank 1 after the failure of test_inner.py::test_post_mortem[gloo-2]" in text
        assert "ValueError: rank 0 fails meanwhile" in text


def test_what_a_debugger_needs_is_said(run):
    source = "@W\ndef test_it(rank):\n    breakpoint()\n"
    result = run(source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*RuntimeError: breakpoint() in rank ?, which has no terminal; *--rank-pdb ?"])
    for options, words in [(["--rank-pdb=-1"], "from 0 on; got -1"), (["--rank-pdb=0", "-n2"], "use -n 0")]:
        result = run(source, *options)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert words in result.stderr.str()


WITHOUT = """
@pytest.mark.world_size(2, 3)
def test_body(rank):
    dist.barrier()
"""
CALLS = """
def one():
    return dist.get_rank()

def test_call(world):
    world.run(one, world_size=2)

def test_larger_call(world):
    world.run(one, world_size=3)
"""


def test_a_rank_that_no_test_has_is_a_usage_error(run):
    result = run(WITHOUT, "--rank-pdb=7")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert (
        "--rank-pdb 7: no test has a rank 7; the largest world_size is 3, that of test_inner.py::test_body[gloo-3]: "
        "take one of 0 to 2, or mark the test world_size(8)" in result.stderr.str()
    )


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_the_tests_that_lack_the_rank_are_named_and_run(run, world):
    result = run(WITHOUT + CALLS, "--rank-pdb=2", world=world)
    result.assert_outcomes(passed=4)
    told = [line for line in result.outlines if line.startswith("--rank-pdb")]
    lacks = "1 of 2 tests on ranks have no rank 2, and no debugger: test_inner.py::"
    assert told == [f"--rank-pdb 2: {lacks}test_body[{world}-2]", f"--rank-pdb 2: {lacks}test_call[{world}]"]


@pytest.mark.parametrize("options", [["--rank-pdb=1"], ["--rank-pdb=7", "--collect-only"], []], ids=" ".join)
def test_nothing_is_said_where_all_tests_have_the_rank_or_nothing_runs(run, options):
    result = run(WITHOUT + CALLS, *options, world="sim")
    assert result.ret == 0
    assert "have no rank" not in result.stdout.str()
