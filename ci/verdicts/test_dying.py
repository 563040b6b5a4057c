"""Tests whose ranks end; for process worlds only. The next test must find healed ranks."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist


@pytest.mark.world_size(2)
def test_failed_killed(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.world_size(2)
def test_passed_healed(rank):
    dist.barrier()
