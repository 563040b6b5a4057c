"""Reports show the lines that call a communication wrapper, of a known framework or declared, or a helper."""

from __future__ import annotations

import pytest

from pdlcheck.worlds import get_world

WRAPPER = """
import torch.distributed as dist

def all_reduce(tensor, async_op=False):
    return dist.all_reduce(tensor, async_op=async_op)

def send(tensor, peer):
    dist.send(tensor, peer)
"""
PROGRAM = """
import {module} as comm

@W
def test_mismatch(rank):
    ones = torch.ones(2 + rank)
    comm.all_reduce(ones)

@W
def test_deadlock(rank):
    comm.send(torch.ones(2), 1 - rank)

@W
def test_last(rank):
    comm.all_reduce(torch.ones(2))
    assert rank == 3

def test_called(world):
    world.run(called, world_size=2)

def called():
    comm.all_reduce(torch.ones(2 + dist.get_rank()))
"""
LINES = {"mismatch": 10, "deadlock": 14, "last": 18, "called": 25}


def write(pytester, module):
    *folders, name = module.split(".")
    folder = pytester.path.joinpath(*folders)
    folder.mkdir(parents=True, exist_ok=True)
    for below in [pytester.path.joinpath(*folders[: depth + 1]) for depth in range(len(folders))]:
        (below / "__init__.py").touch()
    (folder / f"{name}.py").write_text(WRAPPER)
    pytester.syspathinsert()


def wrong_lines(result):
    """Return the lines of failures that name the two files."""
    return [line for line in result.outlines if line.startswith("E  ") or "last operation" in line]


@pytest.mark.parametrize("world", ["sim", "gloo"])
@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("deepspeed.comm.torch", ()),
        ("composer.utils.dist", ()),
        ("mine_a.comm", ("-o", "pdlcheck_comm_wrappers=mine_a.comm")),
        ("mine_b.comm", ("-o", "pdlcheck_comm_wrappers=mine_b")),
    ],
)
def test_the_lines_that_call_a_wrapper_are_shown(run, pytester, monkeypatch, world, module, options):
    write(pytester, module)
    result = run(PROGRAM.format(module=module), *options, world=world)
    result.assert_outcomes(failed=4)
    text = "\n".join(wrong_lines(result))
    for line in LINES.values():
        assert f"at test_inner.py:{line}" in text
    assert module.rpartition(".")[2] + ".py:" not in text


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_without_being_declared_its_own_line_is_shown(run, pytester, world):
    write(pytester, "mine_c.comm")
    result = run(PROGRAM.format(module="mine_c.comm"), world=world)
    result.assert_outcomes(failed=4)
    text = "\n".join(wrong_lines(result))
    assert "mine_c/comm.py:5" in text
    assert "at test_inner.py:10" not in text


HELPER = """
def my_all_gather(out, x):
    return dist.all_gather_into_tensor(out, x, async_op=True)

def first(out):
    return my_all_gather(out, torch.ones(2))

def second(out):
    return my_all_gather(out, torch.ones(2))

@W
def test_hazard():
    first(torch.empty(4)).wait()
    b = torch.empty(4)
    work = second(b)
    total = float(b.sum())
    work.wait()
    assert total == 4

@W
def test_one_caller():
    b = torch.empty(4)
    work = second(b)
    total = float(b.sum())
    work.wait()
    assert total == 4

@pytest.mark.world_size(2)
@pytest.mark.semantics("rendezvous", leaks=True)
def test_left_behind():
    first(torch.empty(4)).wait()
    second(torch.empty(4))
"""


def test_a_helper_that_several_lines_call_is_told_with_its_caller(run):
    result = run(HELPER, "-W", "ignore", world="sim")
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(
        ["E *posted  all_gather * collective 1, at test_inner.py:6, called at test_inner.py:12"],
    )
    result.stdout.fnmatch_lines(["E *posted  all_gather * collective 0, at test_inner.py:6"])
    result.stdout.fnmatch_lines(["E *rank 0: all_gather * at test_inner.py:6, called at test_inner.py:12; nobody*"])


def test_on_processes_the_last_operation_is_told_with_its_caller(run):
    result = run(HELPER, "-W", "ignore", "-k", "hazard", world="gloo")
    result.stdout.fnmatch_lines(["*last operation all_gather * at test_inner.py:6, called at test_inner.py:12*"])


def test_names_are_checked():
    with pytest.raises(TypeError, match=r"comm_wrappers takes a list of modules' names, got 'mine'"):
        get_world("sim", comm_wrappers="mine")
    with pytest.raises(TypeError, match=r"comm_wrappers takes a list of modules' names, got \[1\]"):
        get_world("gloo", comm_wrappers=[1])
    assert get_world("sim", comm_wrappers=["mine"]).run(lambda: 1, world_size=1) == [1]
