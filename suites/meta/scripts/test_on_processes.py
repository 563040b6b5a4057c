"""``pdlcheck run`` on processes of this machine, and under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

TRAIN = """
import os, sys
import torch, torch.distributed as dist
import helper

dist.init_process_group("gloo")
helper.rank = dist.get_rank()
total = torch.ones(4)
dist.all_reduce(total)
print("rank", helper.rank, "has", total.sum().item())
if "--hang" in sys.argv and helper.rank == 0:
    dist.all_reduce(total)
if "--leave" in sys.argv and helper.rank == 1:
    os._exit(7)
if "--leave" in sys.argv:
    dist.all_reduce(total)
"""
LAUNCHES = {
    "gloo": ["-m", "pdlcheck", "run", "-n", "2", "--world", "gloo"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "pdlcheck", "run"],
}


@pytest.fixture(params=["gloo", pytest.param("torchrun", marks=pytest.mark.slow)])
def launch(request, tmp_path):
    (tmp_path / "helper.py").write_text("rank = None\n")
    (tmp_path / "train.py").write_text(TRAIN)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV_CORE"))}

    def run(*words):
        command = [sys.executable, *LAUNCHES[request.param], "train.py", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)

    return run


def test_a_right_script_ends_with_one_line(launch):
    run = launch()
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == [f"[rank {rank}] rank {rank} has 8.0" for rank in range(2)]
    assert "no fault seen on gloo: 2 ranks, 1 collective, 16 B for each rank\n" in run.stderr


@pytest.mark.slow
def test_a_hang_is_one_report(launch):
    run = launch("--hang")
    assert run.returncode == 1
    assert run.stderr.count("no rank can go on: 1 of 2 are blocked") == 1, run.stderr
    assert "rank 1 has returned and will not take part" in run.stderr


@pytest.mark.slow
def test_a_rank_that_leaves_is_named(launch):
    run = launch("--leave")
    assert run.returncode == 1
    assert "rank 1 ended its process with exit code 7" in run.stderr, run.stderr
