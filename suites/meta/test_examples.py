"""The examples run as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_pipeline_prints_its_grid_and_learns(tmp_path):
    path = EXAMPLES / "pipeline.py"
    if not path.exists():
        pytest.skip("needs examples/: run the suites in a clone of the repository")
    assert len(path.read_text().splitlines()) < 80
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "1f1b: 2 stages on 2 ranks, 4 micro-batches, 10 steps\n" in done.stdout
    assert "rank 1   .  F0  B0  F1  B1  F2  B2  F3  B3   .\n" in done.stdout
    losses = [float(text) for text in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 0.5 * losses[0]
