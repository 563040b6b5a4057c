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


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_closed_world_leaves_nothing_exchanged(world, tmp_path):
    assert _left_behind(world, tmp_path) == ""


def test_the_comparison_sees_what_is_exchanged_while_ranks_are_open(tmp_path):
    found = _left_behind("sim", tmp_path, "open")
    assert [name for name in EXCHANGED if name not in found] == []
