"""The example of local SGD runs under torchrun, learns, and draws."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .test_launched import outside

EXAMPLE = Path(__file__).parents[2] / "examples" / "local_sgd.py"

if not EXAMPLE.is_file():
    pytest.skip("the examples are not installed: run this in a clone of the repository", allow_module_level=True)


def torchrun(folder, *options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [*command, str(EXAMPLE), *options],
        cwd=folder,
        env=outside() | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_network_learns_on_ranks_with_uneven_shares_and_the_plot_is_text(tmp_path):
    text = torchrun(tmp_path, "--epochs", "12")
    error = re.search(r"2 ranks, mean squared error ([\d.]+)", text)
    assert error is not None, text
    assert float(error[1]) < 0.5  # of a target whose mean square is 5
    drawn = [line for line in text.splitlines() if "|" in line]
    assert len(drawn) == 20
    assert all("x" in line for line in drawn)


def test_the_fit_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib: pip install pdlcheck[report]")
    torchrun(tmp_path, "--epochs", "1", "--plot", "fit.svg")
    assert "<svg" in (tmp_path / "fit.svg").read_text()
