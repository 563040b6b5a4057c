"""State that a rank leaves in torch must not end with its thread: a CUDA build without a device would crash."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pdlcheck.worlds.simulated.process_state.device_guard import outlives_ranks

RANKS_THAT_COME_AND_GO = """
from torch import empty
from torch._subclasses.fake_tensor import FakeTensorMode
from pdlcheck.worlds import get_world

def fake():
    for _ in range(100):
        with FakeTensorMode():
            empty(3)

for world_size in range(1, 8):  # more than are kept idle
    get_world("sim").run(fake, world_size=world_size)
fake()
print("lives")
"""


@pytest.mark.slow
def test_a_fake_tensor_of_a_rank_that_has_ended_does_not_crash_the_next_one():
    ended = subprocess.run([sys.executable, "-c", RANKS_THAT_COME_AND_GO], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "lives\n"), ended.stderr


def test_a_torch_without_such_a_guard_needs_none(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delattr(torch._C, "_ensureCUDADeviceGuardSet", raising=False)
    outlives_ranks.__wrapped__()
