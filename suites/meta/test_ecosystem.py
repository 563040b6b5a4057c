"""pdlcheck beside other plugins and tools of pytest's users."""

from __future__ import annotations

import json
import os
import re
import sys
from types import SimpleNamespace

import pexpect
import pytest

# the inner runs forget the modules that they import: what keeps state must be there before
import pdlcheck.harness.processes
import pdlcheck.harness.simulated  # noqa: F401
from pdlcheck.harness.devices import divide_among_workers

HEAD = """
import os, random, time
import numpy, pytest, torch, torch.distributed as dist
W = pytest.mark.world_size(2)
"""


@pytest.fixture
def run(pytester):
    """Write files, run them on rank processes in a pytest of their own."""

    def run(source, *options, new_process=False, **files):
        pytester.makepyfile(test_inner=HEAD + source, **files)
        start = pytester.runpytest_subprocess if new_process else pytester.runpytest_inprocess
        return start("--world", "gloo", *options)

    return run


MEASURED = """
import torch.distributed as dist

def where():
    if dist.get_rank() == 0:
        return "zero"
    return "one"

def late(x):
    for _ in range(x):
        pass
    return x

def never():
    return 1
"""


def test_pytest_cov_counts_what_only_ranks_ran(run, pytester):
    result = run(
        """
import measured

@W
def test_body(rank):
    measured.where()

def test_function(world):
    world.run(measured.late, 2, world_size=2)

@W
def test_a_rank_dies(rank):
    if rank == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()
""",
        "--cov=measured",
        "--cov-branch",
        "--cov-report=json",
        new_process=True,
        measured=MEASURED,
    )
    result.assert_outcomes(passed=2, failed=1)
    _all_but_one_line_is_covered(pytester.path)


def _all_but_one_line_is_covered(path):
    report = json.loads((path / "coverage.json").read_text())["files"]["measured.py"]
    assert (report["missing_lines"], report["missing_branches"]) == ([14], []), report
    assert [left.name for left in path.glob(".coverage*")] == [".coverage"]


def test_workers_of_xdist_have_ranks_of_their_own_and_measure_coverage(run, pytester):
    result = run(
        """
import measured

@pytest.fixture(scope="session", autouse=True)
def everything():
    yield
    if dist.is_initialized():
        name = f"end-{os.environ['PYTEST_XDIST_WORKER']}-{dist.get_world_size()}-{dist.get_rank()}"
        open(name, "x").close()  # an error if it is done twice

@W
@pytest.mark.parametrize("i", range(8))
def test_many(i, rank, tmp_path):
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    assert x.item() == 1
    measured.where()

@pytest.mark.world_size(3)
@pytest.mark.parametrize("i", range(2))
def test_more(i, world_size):
    measured.late(world_size)

@W
def test_output(rank):
    print(f"said by {rank}")
    assert rank == 0
""",
        "-n2",
        "--cov=measured",
        "--cov-branch",
        "--cov-report=json",
        new_process=True,
        measured=MEASURED,
    )
    result.assert_outcomes(passed=10, failed=1)
    ended = {path.name for path in pytester.path.glob("end-*")}
    assert {name for name in ended if name.endswith("0")}, "each pool has torn its session down"
    _all_but_one_line_is_covered(pytester.path)
    result.stdout.fnmatch_lines(["*Captured stdout call ?rank 1?*", "said by 1"])


def test_each_worker_sees_its_own_devices(tmp_path):
    def seen(worker, count, **environment):
        for number in range(4):
            (tmp_path / str(number)).mkdir(exist_ok=True)
        config = SimpleNamespace(workerinput={"workerid": f"gw{worker}", "workercount": count})
        divide_among_workers(config, environment, tmp_path)
        return environment.get("CUDA_VISIBLE_DEVICES")

    assert [seen(worker, 2) for worker in range(2)] == ["0,1", "2,3"]
    assert [seen(worker, 2, CUDA_VISIBLE_DEVICES="7,GPU-a,5") for worker in range(2)] == ["7,GPU-a", "5"]
    assert [seen(worker, 3, CUDA_VISIBLE_DEVICES="1") for worker in range(3)] == ["1"] * 3
    untouched = {}
    divide_among_workers(SimpleNamespace(), untouched, tmp_path)
    assert untouched == {}


LIMITED = """
@W
@pytest.mark.timeout(1.5)
def test_hangs(rank):
    if rank == 0:
        time.sleep(50)
    dist.barrier()

@W
def test_ini(rank):
    dist.barrier()
    if rank == 1:
        time.sleep(50)

@W
def test_after(rank):
    dist.barrier()

@pytest.mark.timeout(0.5, method="signal")
def test_controller(world):
    time.sleep(50)

def sleep():
    time.sleep(50)

@pytest.mark.timeout(1)
def test_function(world):
    world.run(sleep, world_size=2)

@W
@pytest.mark.timeout(60, func_only=True)
def test_enough(rank):
    time.sleep(0.1)
"""


def test_the_limits_of_pytest_timeout_are_kept_by_the_ranks(run, pytester):
    pytester.makeini("[pytest]\ntimeout = 2\ntimeout_method = thread\n")  # this method would end the process
    result = run(LIMITED, new_process=True)
    result.assert_outcomes(passed=2, failed=4)
    result.stdout.fnmatch_lines(
        [
            "E   RankTimeout: no result within 1.[345] s from ranks 0, 1 of 2",
            "E     rank 0: busy at test_inner.py:9",
            "E     rank 1: busy in barrier, default group (ranks 0, 1), collective 0, at test_inner.py:10",
            "E   stack of rank 0, innermost call last:",
            'E     File "*test_inner.py", line 9, in test_hangs',
            "E   stack of rank 1, innermost call last:",
            'E     File "*test_inner.py", line 10, in test_hangs',
            "E   RankTimeout: no result within * s from rank 1 of 2",
            "E     rank 0: has returned; last operation barrier, default group *, collective 0, at test_inner.py:14",
            "E   *Failed: Timeout *from pytest-timeout*",
            "E   *RankTimeout: no result within * s from ranks 0, 1 of 2",
            "E*   rank 0: busy at test_inner.py:27",
        ]
    )
    assert "/_pytest/" not in result.stdout.str(), "the stacks are the user's"


def test_the_marker_counts_without_pytest_timeout_too(run):
    result = run(LIMITED, "-p", "no:timeout", "-k", "hangs or after", "--strict-markers")
    result.assert_outcomes(passed=1, failed=1, deselected=4)
    result.stdout.fnmatch_lines(["E   RankTimeout: no result within 1.[345] s from ranks 0, 1 of 2"])


def test_pytest_randomly_reorders_and_seeds_without_making_ranks_alike(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_ADDOPTS")  # it disables this plugin for the other tests
    pytester.makepyfile(
        test_inner=HEAD
        + """
@W
@pytest.mark.parametrize("i", range(6))
def test_streams(i, rank):
    drawn = [None, None]
    dist.all_gather_object(drawn, (random.random(), numpy.random.rand(), torch.rand(1).item()))
    assert all(x != y for x, y in zip(*drawn))
    print("drawn", drawn[0][:2], i)
"""
    )
    lines = []
    for _ in range(2):
        result = pytester.runpytest_inprocess("--world", "gloo", "--randomly-seed=3", "-rP")
        result.assert_outcomes(passed=6)
        lines.append([line for line in result.outlines if line.startswith("drawn")])
    assert lines[0] == lines[1] and len(set(lines[0])) == 6
    order = [line.split()[-1] for line in lines[0][::2]]
    assert order != sorted(order)


def test_last_failed_and_stepwise(run):
    source = """
@W
def test_good(): pass

@W
def test_bad(rank): assert rank == 0

@W
def test_worse(rank): assert rank == 1
"""
    run(source, "--sw").assert_outcomes(passed=1, failed=1)
    run(source, "--lf").assert_outcomes(failed=1, deselected=0)


def test_a_file_of_deepspeed_runs_as_it_stands(run):
    run(
        """
import deepspeed_like

class TestReduce:
    world_size = 4  # what its own harness would read

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
    def test(self, dtype, tmpdir, class_tmpdir):
        x = torch.ones(3, dtype=dtype) * (dist.get_rank() + 1)
        dist.all_reduce(x)
        assert torch.all(x == 3)

    @pytest.mark.world_size([2, 3])
    def test_sizes(self, rank): dist.barrier()

@pytest.fixture
def class_tmpdir(tmpdir): return tmpdir
""",
        deepspeed_like="",
    ).assert_outcomes(passed=4)


COMPOSERS = """
def world_size(*sizes):  # Composer's own decorator puts the marker on single parameters, and none for one rank
    marked = [pytest.param(n, marks=pytest.mark.world_size(n)) if n > 1 else pytest.param(1) for n in sizes]
    return pytest.mark.parametrize("world_size", marked)

@world_size(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_sum(world_size, dtype):
    assert (dist.get_world_size() if dist.is_initialized() else 1) == world_size
    x = torch.ones(3, dtype=dtype)
    if world_size > 1:
        dist.all_reduce(x)
    assert torch.all(x == world_size)
"""


def test_a_file_of_composer_runs_as_it_stands(run):
    result = run(COMPOSERS, "-v", "--world", "sim,gloo")
    result.assert_outcomes(passed=10)
    ids = re.findall(r"test_sum\[(\S+)\] PASSED", result.stdout.str())
    dtypes = "torch.float32", "torch.int64"
    cases = {"": 1, "sim-2-": 2, "gloo-2-": 2, "sim-3-": 3, "gloo-3-": 3}
    assert ids == [f"{case}{dtype}-{size}" for case, size in cases.items() for dtype in dtypes]


def test_a_marker_on_a_single_parameter_counts_more_than_that_of_the_test(run):
    run(
        """
@W
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=[pytest.mark.world_size(3, 4), pytest.mark.xfail])])
def test_sizes(n, world_size):
    assert n == world_size == 2
"""
    ).assert_outcomes(passed=1, xfailed=2)


def test_a_marker_on_a_single_parameter_names_the_test_where_it_is_wrong(run):
    result = run(
        """
@pytest.mark.parametrize("n", [2, pytest.param(0, marks=pytest.mark.world_size(0))])
def test_sizes(n): pass
"""
    )
    result.stdout.fnmatch_lines("*test_sizes: world_size takes numbers of ranks of at least 1*got 0")
    result.stdout.no_fnmatch_line("*Traceback*")


def test_parameters_without_the_marker_beside_the_fixture_world_are_refused(run):
    result = run(
        """
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=W)])
def test_sizes(n, world): pass
"""
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("*test_sizes: world_size on some parameters of a test that uses the fixture world;*")


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


def test_the_debugger_of_the_controller_says_where_that_of_the_rank_is(pytester):
    pytester.makepyfile(HEAD + "@W\ndef test_one(rank):\n    assert rank != 1\n")
    result = pytester.runpytest_subprocess("--pdb", "--world", "gloo")
    hint = "--pdb is the controller's, without the frames of the ranks: --rank-pdb 1 has them"
    result.stdout.fnmatch_lines([hint, "*entering PDB*", "*1 failed*"])


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


SIMULATED = """
import signal, time

@pytest.fixture
def own(rank):
    yield rank
    print(f"rank {rank} is torn down")

@pytest.fixture
def slow(rank, own):
    if rank == 1:
        time.sleep(5)

@W
@pytest.mark.timeout(1.5)
def test_sleeps(rank, own):
    if rank == 1:
        time.sleep(5)
    dist.barrier()

@W
@pytest.mark.timeout(1.5)
def test_computes(rank, own):
    while rank == 1:
        pass
    dist.barrier()

@W
@pytest.mark.timeout(1.5)
def test_communicates(rank, own):
    while True:
        dist.barrier()

@W
@pytest.mark.timeout(1.5)
def test_in_a_fixture(slow): pass

@W
@pytest.mark.timeout(1.5)
@pytest.mark.schedules(5)
def test_under_schedules(rank, own):
    while True:
        pass

@W
def test_after(rank, own, tmp_path):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
    if rank == 1:  # by now those that slept have woken up
        time.sleep(5)
"""


def test_simulated_ranks_that_do_not_end_are_replaced(pytester):
    pytester.makepyfile(test_inner=HEAD + SIMULATED)
    result = pytester.runpytest_subprocess("--world", "sim", "-p", "no:randomly", "-rA", timeout=100)
    result.assert_outcomes(passed=1, failed=4, errors=1, warnings=0)
    text = result.stdout.str()
    assert text.count("rank 1 does not stop and is left behind; what follows has fresh ranks") >= 2, text
    assert text.count("rank 0 is torn down") == text.count("rank 1 is torn down") == 5, text


@pytest.mark.parametrize("place", ["test", "fixture"])
def test_ctrl_c_ends_a_run_of_simulated_ranks_that_sleep(pytester, place):
    press = """
    if rank == 1:
        threading.Timer(0.5, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
        time.sleep(1000)
"""
    bodies = {"test": ("", press), "fixture": (press, "")}[place]
    source = """
import signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)

@pytest.fixture
def fixture(rank, monkeypatch):
    "no more"{}

@W
def test_sleeps(rank, fixture):
    "no more"{}
"""
    pytester.makepyfile(test_inner=HEAD + source.format(*bodies))
    result = pytester.runpytest_subprocess("--world", "sim", timeout=60)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*KeyboardInterrupt*"])


@pytest.mark.parametrize("arguments", ["rank", "world"])
def test_the_limit_of_the_first_test_on_simulated_ranks_does_not_count_the_import_of_torch(pytester, arguments):
    pytester.makeconftest(
        """
        import sys, time

        class Slow:
            def find_spec(self, name, path, target=None):
                if name == "torch":
                    time.sleep(4)

        sys.meta_path.insert(0, Slow())
        """
    )
    pytester.makepyfile(
        f"""
        import pytest, sys
        assert "torch" not in sys.modules

        {'@pytest.mark.world_size(2)' if arguments == 'rank' else ''}
        @pytest.mark.timeout(4)
        def test_first({arguments}): pass
        """
    )
    pytester.runpytest_subprocess("--world", "sim", timeout=100).assert_outcomes(passed=1)
