"""If torch lacks a name that the simulated world needs, the error names it and the cure."""

from __future__ import annotations

import subprocess
import sys

import pytest

HIDE = """
import torch, torch.distributed.distributed_c10d as c10d
from torch.distributed import c10d_logger
{hide}
from pdlcheck.worlds import get_world
get_world("sim").run(print, world_size=2)
"""


@pytest.mark.parametrize(
    ("hide", "name"),
    [
        ("del torch._C._distributed_c10d._set_thread_isolation_mode", "_set_thread_isolation_mode"),
        ("del c10d._World.pg_names", "_World.pg_names"),
        ("del c10d_logger._c10d_logger", "_c10d_logger"),
    ],
)
def test_a_torch_that_lacks_an_internal_name_is_refused_with_the_name_and_the_cure(hide, name):
    done = _run(HIDE.format(hide=hide))
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("pdlcheck.errors.Unsupported: the simulated world does not know torch 2.")
    assert name in last
    assert "use --world gloo" in last


def test_a_torch_that_has_them_all_is_not_refused():
    assert _run(HIDE.format(hide="")).returncode == 0


def _run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
