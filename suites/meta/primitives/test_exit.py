"""A process that trained with the primitives ends its group completely, so that its interpreter can exit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads threads in /proc: run it on Linux")

TRAIN = """
import gc, sys
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters())  # the first optimizer imports much of torch
dist.all_reduce(torch.zeros(1))
dist.destroy_process_group()
gc.collect()
print(sorted({task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}), flush=True)
"""


def threads_left(program, folder):
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder / "store")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode in (0, -6), done.stderr  # -6: remaining threads can abort the process
    return [name for name in ("gloo_tcp_loop", "pt_gloo_runloop") if name in done.stdout]


@pytest.mark.slow
def test_destroying_the_group_ends_its_threads(tmp_path):
    assert threads_left("import pdlcheck.primitives\n" + TRAIN, tmp_path) == []


@pytest.mark.slow
def test_without_the_primitives_torch_keeps_them(tmp_path):
    """If this fails, torch no longer captures the default group: delete the import in primitives/__init__.py."""
    assert threads_left(TRAIN, tmp_path)
