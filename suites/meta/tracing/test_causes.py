"""Causes that a comparison gives: each where it holds, and a neighbour for which it is not said."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pdlcheck
from pdlcheck.tracing import Mapping, compare_traces
from pdlcheck.worlds import get_world


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.drop, self.down = nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x)))


def train(folder, change=None, *, model=None, optimizer=None, mapping=None, replicas: bool = False) -> None:
    """Record one step, on one process or on data parallel ranks; ``change`` plants a fault."""
    torch.manual_seed(3)
    model = Network() if model is None else model
    model.drop.p = 0.0
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() and not replicas else (0, 1)
    trained = DistributedDataParallel(model) if size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if change is not None:
        change(model, optimizer, dist.get_rank() if dist.is_initialized() else 0)
    if replicas:
        mapping = Mapping(ranks={"tp": (dist.get_rank(), dist.get_world_size())})
    with pdlcheck.trace(trained, optimizer, folder, steps=1, mapping=mapping):
        batch = torch.linspace(-1, 1, 32).view(8, 4).sin()
        trained(batch.chunk(size)[rank]).square().mean().backward()
        optimizer.step()


def changed(name: str, change):
    """Return a fault: the output of a module, changed by a function of the output and the rank."""

    def plant(model, optimizer, rank) -> None:
        model.get_submodule(name).register_forward_hook(lambda module, args, output: change(output, rank))

    return plant


def drop(model, optimizer, rank) -> None:
    model.drop.p = 0.5


def cut(model, optimizer, rank) -> None:
    model.up.register_forward_hook(lambda module, args, output: output + 0 * output.detach())
    model.drop.register_forward_hook(lambda module, args, output: output.detach() + 0 * output)


def zeroed(model, optimizer, rank) -> None:
    def zero(*_) -> None:
        model.up.bias.grad.zero_()

    optimizer.register_step_pre_hook(zero)


def missing(model, optimizer, rank) -> None:
    def remove(*_) -> None:
        model.up.bias.grad = None

    if rank == 1:
        optimizer.register_step_pre_hook(remove)


def skipped(model, optimizer, rank) -> None:
    if rank == 1:
        optimizer.param_groups[0]["params"] = [one for one in model.parameters() if one is not model.up.bias]


def scaled(model, optimizer, rank) -> None:
    optimizer.param_groups[0]["lr"] = 0.25


@pytest.fixture(scope="module")
def trusted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces") / "trusted"
    train(folder)
    return folder


def inf_on_rank_1(output, rank):
    return output.masked_fill(torch.arange(6) == 2, float("inf")) if rank else output


def row_of_zeros(output, rank):
    return output * (torch.arange(len(output)) != 1).unsqueeze(1)


def noisy(output, rank):
    return output + 0.1 * torch.arange(6) * rank


def exchanged(output, rank):
    return output.flip(0)


CASES = {  # name -> fault, copies or samples on the ranks, module, direction, cause
    "inf": (changed("up", inf_on_rank_1), False, "up", "forward", "rank 1 got inf or NaN here"),
    "a dropped row": (changed("up", row_of_zeros), False, "up", "forward", "2 of 8 rows .* all of them zero"),
    "dropout": (drop, False, "drop", "forward", "the module draws random numbers"),
    "a cut graph": (cut, False, "drop", "backward", "are zero. no gradient arrives there"),
    "a zeroed gradient": (zeroed, False, "up", "gradient to the optimizer", "the gradient is zero there"),
    "a missing gradient": (missing, False, "up", "gradient to the optimizer", "rank 1 had no gradient"),
    "a skipped parameter": (
        skipped,
        False,
        "up",
        "update",
        "rank 1 are zero. the optimizer did not change",
    ),
    "another learning rate": (scaled, False, "up", "update", "1/2 times .* the learning rate"),
    "a replica that differs": (changed("up", noisy), True, "up", "forward", "rank 1 should hold a copy of what"),
    "one rank of two": (changed("up", noisy), False, "up", "forward", "at dp 1 are wrong, those at dp 0 are right"),
    "rows in another order": (changed("up", exchanged), False, "up", "forward", "None"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_cause_is_said_of_its_fault_alone(trusted, tmp_path, name):
    fault, replicas, module, direction, cause = CASES[name]

    def program(folder):
        train(folder, fault, replicas=replicas)

    get_world("sim").run(program, tmp_path / "parallel", world_size=2)
    first = compare_traces(trusted, tmp_path / "parallel").first
    assert (first.place.module, first.place.direction) == (module, direction), first
    assert re.search(cause, str(first.cause)), first
    for other, (*_, text) in CASES.items():
        assert other == name or not re.search(text, str(first.cause)), (other, first.cause)
