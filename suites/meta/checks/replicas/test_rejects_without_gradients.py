"""check_replicas_in_sync explains weights that differ even if no gradient is left to compare."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_replicas_in_sync


@pytest.mark.parametrize("updates", [3, 1], ids=["all", "rank 0"])
def test_an_average_of_weights_that_one_rank_alone_updates_is_told_from_a_learning_rate(world, updates):
    def start():
        torch.manual_seed(0)
        both = nn.ModuleDict({"model": nn.Linear(2, 1), "average": nn.Linear(2, 1).requires_grad_(False)})
        model = DistributedDataParallel(both["model"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(i):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if dist.get_rank() < updates:
                both["average"].weight.data.lerp_(both["model"].weight.data, 0.5)

        return both, step

    if updates == 3:
        check_replicas_in_sync(start, world)
        return
    with pytest.raises(AssertionError, match=r"(?s)'average.weight'.*no gradient reaches them: .* an average"):
        check_replicas_in_sync(start, world)


@pytest.mark.parametrize(("early", "told"), [(True, "gradients differ"), (False, "no gradients are left to look at")])
def test_gradients_that_are_cleared_after_the_step_tell_nothing(world, early, told):
    def start():
        model = nn.Linear(2, 1)
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(i):
            if early:
                optimizer.zero_grad()
            model(torch.randn(4, 2)).square().mean().backward()
            optimizer.step()
            if not early:
                optimizer.zero_grad()

        return model, step

    with pytest.raises(AssertionError, match=rf"differ after step 1.*\n.*\n.*likely cause +{told}"):
        check_replicas_in_sync(start, world)
