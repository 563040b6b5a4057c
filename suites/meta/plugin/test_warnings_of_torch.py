"""Reports have no warnings of torch that the plugin or a check causes."""

from __future__ import annotations

import pytest

PROGRAM = """
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from pdlcheck.checks import check_gradients_equal_single_process, check_replicas_in_sync, check_resume

@pytest.mark.world_size(2)
def test_body(rank):
    model = DistributedDataParallel(nn.Linear(2, 1))
    model(torch.ones(3, 2)).sum().backward()
    objects = [None] * 2
    dist.all_gather_object(objects, {"a": torch.ones(2)})
    dist.barrier()
    assert objects == [], "wanted"

def add(model, num_samples):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)

def test_gradients(world):
    shards = [(torch.ones(2, 3), torch.zeros(2, 1)), (torch.zeros(2, 3), torch.ones(2, 1))]
    check_gradients_equal_single_process(lambda: nn.Linear(3, 1), nn.MSELoss(), shards, add, world)

def start(saves=False):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    def step(i):
        optimizer.zero_grad()
        model(torch.full((2, 2), i + 1.0 + dist.get_rank())).sum().backward()
        optimizer.step()
        scheduler.step()
    return model, step, lambda path: torch.save(model.state_dict(), f"{path}-{dist.get_rank()}"), lambda path: (
        model.load_state_dict(torch.load(f"{path}-{dist.get_rank()}"))
    )

def test_replicas(world):
    check_replicas_in_sync(lambda: start()[:2], world)

def test_resume(world):
    check_resume(start, world)
"""


@pytest.mark.slow
@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_failures_come_without_warnings_of_torch(pytester, world):
    pytester.makepyfile(test_mine=PROGRAM)
    result = pytester.runpytest_subprocess("--world", world, "-p", "no:cacheprovider", "-W", "default")
    result.assert_outcomes(failed=4, warnings=0)
    said = result.stdout.str() + result.stderr.str()
    assert "Warning" not in said
    assert "[W" not in said  # what torch's C++ code writes to stderr
