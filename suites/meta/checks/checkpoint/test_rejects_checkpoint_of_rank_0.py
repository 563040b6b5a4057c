"""The check of resuming with the usual checkpoint of DistributedDataParallel, which rank 0 saves for all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_resume


def trainer(forgets=()):
    """Return a training whose batch-norm statistics differ between ranks until the next forward pass.

    The forward pass broadcasts those of rank 0.
    """

    def start():
        wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
        data = torch.arange(48.0).view(6, 4, 2).sin() + dist.get_rank()

        def step(i):
            optimizer.zero_grad()
            (wrapped(data[i]) - 1).square().mean().backward()
            optimizer.step()

        def save(path):
            if dist.get_rank() == 0:
                torch.save({"model": wrapped.state_dict(), "optimizer": optimizer.state_dict()}, path)
            dist.barrier()

        def load(path):
            state = torch.load(path)
            kept = {name: held for name, held in state["model"].items() if name not in forgets}
            wrapped.load_state_dict(kept, strict=False)
            if "optimizer" not in forgets:
                optimizer.load_state_dict(state["optimizer"])

        return wrapped, step, save, load

    return start


def test_statistics_that_rank_0_sends_before_each_forward_pass_may_be_left_out(world):
    check_resume(trainer(), world, buffers=False)
    accepted = r"(?s)rank 1 before a step was taken .* of buffer .*what rank 0 held.*: right only .* buffers=False"
    with pytest.raises(AssertionError, match=accepted):
        check_resume(trainer(), world)


def test_parameters_and_the_optimizer_may_not(world):
    with pytest.raises(AssertionError, match="lost: optimizer"):
        check_resume(trainer(["optimizer"]), world, buffers=False)
    with pytest.raises(AssertionError, match=r"of parameter 'module.2.bias'.*\n.*it is what start made"):
        check_resume(trainer(["module.2.bias"]), world, buffers=False)
