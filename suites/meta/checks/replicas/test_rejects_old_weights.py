"""check_replicas_in_sync tells weights of an earlier step from weights that went another way."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_replicas_in_sync

EARLIER = "rank 1 holds the parameters {}: the rank took no step, or loaded a file"


def trained(after):
    """Return the ``start`` of a training; ``after(model, optimizer, i)`` ends each step."""

    def start():
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        ddp, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(dist.get_rank())
        ddp.saved = copy.deepcopy(model.state_dict())

        def step(i):
            optimizer.zero_grad()
            ddp(torch.randn(4, 2)).square().mean().backward()
            after(ddp, optimizer, i)

        return ddp, step

    return start


def right(ddp, optimizer, i):
    optimizer.step()


def skips_a_step(ddp, optimizer, i):
    if i != 1 or dist.get_rank() != 1:
        optimizer.step()


def loads_the_start(ddp, optimizer, i):
    optimizer.step()
    if i == 1 and dist.get_rank() == 1:
        ddp.module.load_state_dict(ddp.saved)


def has_another_rate(ddp, optimizer, i):
    optimizer.param_groups[0]["lr"] = 0.2 if dist.get_rank() == 1 else 0.1
    optimizer.step()


@pytest.mark.parametrize(
    ("after", "told"),
    [(skips_a_step, "that it had after step 1"), (loads_the_start, "of the start")],
)
def test_the_step_of_old_weights_is_named(world, after, told):
    check_replicas_in_sync(trained(right), world)
    with pytest.raises(AssertionError, match=f"differ after step 2: .*\n.*\n.*{EARLIER.format(told)}"):
        check_replicas_in_sync(trained(after), world)


def test_weights_that_went_another_way_are_no_old_ones(world):
    with pytest.raises(AssertionError, match="gradients agree: optimizer states or learning rates differ"):
        check_replicas_in_sync(trained(has_another_rate), world)
