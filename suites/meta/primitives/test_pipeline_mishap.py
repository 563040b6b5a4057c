"""Plain gloo processes without a world: a rank fails in the middle of a step, and the others report its error."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ..clone import ROOT

PROGRAM = """
import os, signal, sys
import torch, torch.distributed as dist
from torch import nn
from pdlcheck.primitives import Pipeline

path, rank, place, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=3)

class Fragile(nn.Linear):
    def forward(self, x):
        if rank == place and x.abs().max() > 100:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("bad activation")
        return super().forward(x)

torch.manual_seed(0)
pipeline = Pipeline(nn.Sequential(*(Fragile(3, 3) for _ in range(3))), nn.MSELoss(), n_microbatches=4, split="layers")
pipeline.step(torch.randn(8, 3), torch.randn(8, 3))
pipeline.step(1e4 * torch.randn(8, 3), torch.randn(8, 3))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("place", "how"), [(2, "raises"), (0, "killed")])
def test_ranks_that_lose_another_one_say_what_it_met(tmp_path, place, how):
    """Regression test: they reported that a peer closed the connection."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "meeting")]
    ranks = [
        subprocess.Popen([*command, str(rank), str(place), how], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    said = [process.communicate(timeout=100)[1].rstrip().splitlines() for process in ranks]
    assert all(process.returncode for process in ranks)
    if how == "raises":
        assert said[place][-2:] == [
            f"[rank{place}]: ValueError: bad activation",
            f"[rank{place}]: in the forward pass of micro-batch 0 through stage {place}",
        ]
        told = (
            f"RuntimeError: Pipeline: rank {place} of its group failed in the forward pass of micro-batch 0 through "
            f"stage {place}: ValueError: bad activation"
        )
    else:
        told = "RuntimeError: Pipeline: it lost another rank of its group in the middle of a step; what that rank"
    for rank, lines in enumerate(said):
        assert rank == place or lines[-1].startswith(f"[rank{rank}]: {told}"), lines
