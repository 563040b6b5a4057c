"""If a rank stops early, others meet a collective of the check itself, and the message says so."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.checks import check_replicas_in_sync
from pdlcheck.errors import CollectiveMismatch
from pdlcheck.worlds import get_world


@pytest.mark.parametrize("name", ["sim", "gloo"])
def test_a_rank_that_stops_early_meets_the_check_and_that_is_said(name):
    """The line is in a file of the check, which users do not know."""

    def start():
        model = torch.nn.Linear(2, 1)
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)
        done = []

        def step(number):
            if dist.get_rank() == 0 and done:
                return
            done.append(number)
            for parameter in model.parameters():
                dist.all_reduce(parameter.detach())

        return model, step

    met = r"rank 0: all_gather.* at in_sync\.py:\d+, where the check compares ranks"
    with pytest.raises(CollectiveMismatch, match=met):
        check_replicas_in_sync(start, get_world(name), steps=3)
