"""After ``world.close()``, nothing of Python, torch or pytest stays replaced in the user's process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "left_behind.py"
EXCHANGED = (  # on simulated ranks, one of each kind
    "time.sleep",
    "torch.Tensor.tolist is new",
    "torch.distributed.init_process_group",
    "torch._C._distributed_c10d.TCPStore.__new__ is new",
    "class of torch.distributed.distributed_c10d._world",
    "_pytest.monkeypatch.MonkeyPatch.setattr",
    "filters of torch's logger",
)


def _left_behind(*arguments):
    command = [sys.executable, "-W", "ignore", PROGRAM, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_closed_world_leaves_nothing_exchanged(world, tmp_path):
    assert _left_behind(world, tmp_path) == ""


@pytest.mark.slow
def test_the_comparison_sees_what_is_exchanged_while_ranks_are_open(tmp_path):
    found = _left_behind("sim", tmp_path, "open")
    assert [name for name in EXCHANGED if name not in found] == []


ONE_BEFORE_THE_OTHER = """
import time, pytest

def is_real():
    return type(time.sleep).__name__ == "builtin_function_or_method"

def test_before():
    assert is_real()

@pytest.mark.world_size(2)
def test_on_ranks():
    assert not is_real()

def test_after():
    assert is_real()

@pytest.mark.world_size(2)
def test_on_ranks_again():
    assert not is_real()
"""


def test_tests_without_ranks_have_the_real_functions_in_a_session_with_simulated_ranks(pytester):
    pytester.makepyfile(ONE_BEFORE_THE_OTHER)
    pytester.runpytest_subprocess("--world", "sim", "-p", "no:randomly").assert_outcomes(passed=4)


FORGOTTEN = """
import time
import torch.distributed as dist
from pdlcheck.worlds import get_world

def is_real():
    return type(time.sleep).__name__ == "builtin_function_or_method"

get_world("sim").run(dist.barrier, world_size=2)
print(is_real())
one, other = get_world("sim"), get_world("sim")
one.run(dist.barrier, world_size=2)
other.run(dist.barrier, world_size=2)
one.close()
print(is_real())
other.close()
print(is_real())
one.run(dist.barrier, world_size=2)
print(is_real())
one.close()
print(is_real())
"""


def test_the_last_world_that_closes_or_is_forgotten_gives_the_process_back():
    run = subprocess.run([sys.executable, "-c", FORGOTTEN], capture_output=True, text=True, timeout=100)
    assert run.stdout.split() == ["True", "False", "True", "False", "True"], run.stderr
