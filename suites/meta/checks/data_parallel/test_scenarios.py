"""The scenarios of check_data_parallel: a line in the table is tried, and its name is in the messages."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_data_parallel
from pdlcheck.checks.data_parallel import wrapper
from pdlcheck.checks.data_parallel.scenarios import NO_SYNC, SCENARIOS, Scenario, backward, layers, mean_square
from pdlcheck.primitives import DistributedDataParallel


def test_names_are_distinct():
    names = [scenario.name for scenario in SCENARIOS]
    assert len(names) == len(set(names))


def test_a_line_in_the_table_is_a_scenario(world, monkeypatch):
    """The added scenario leaves this rank's last sample out, as no wrapper can make up for."""
    monkeypatch.setattr(wrapper, "SCENARIOS", (Scenario("a sample left out", layers, _leave_one_out),))
    with pytest.raises(AssertionError, match=r"^DistributedDataParallel, a sample left out: rank 0 holds"):
        check_data_parallel(DistributedDataParallel, world)


def _leave_one_out(wrapped, x, y):
    wrapped.zero_grad(set_to_none=True)
    backward(mean_square(wrapped(x[:-1]), y[:-1]))


def test_an_error_in_a_scenario_names_it_with_the_hint_of_what_it_needs(world, monkeypatch):
    fails = Scenario("a way that fails", layers, _fail, promised=[NO_SYNC])
    monkeypatch.setattr(wrapper, "SCENARIOS", (fails,))
    with pytest.raises(RuntimeError, match="a drive that fails") as raised:
        check_data_parallel(DistributedDataParallel, world)
    tried = "while check_data_parallel tried DistributedDataParallel, a way that fails"
    assert f"{tried}; pass no_sync=False for a wrapper that has no such context" in raised.value.__notes__
    check_data_parallel(DistributedDataParallel, world, no_sync=False)


def _fail(wrapped, x, y):
    raise RuntimeError("a drive that fails")


@pytest.mark.parametrize("world_size", [2, 3])
def test_passes_are_never_as_many_as_ranks(world, monkeypatch, world_size):
    """Otherwise a wrapper that adds up passes would give the sum over ranks."""
    monkeypatch.setattr(wrapper, "SCENARIOS", (Scenario("counted", layers, _count),))
    with pytest.raises(AssertionError, match=rf"counted: rank 0 holds {4 if world_size == 3 else 3} at \(0, 0\)"):
        check_data_parallel(DistributedDataParallel, world, world_size=world_size)


def _count(wrapped, x, y):
    """Leave the number of passes in each element of the gradients."""
    for parameter in wrapped.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.grad is None else parameter.grad + 1


class Averages(nn.Module):
    """A wrapper that averages gradients when the step ends; faults leave some of them out."""

    def __init__(self, module, fault=""):
        super().__init__()
        self.module, self.fault, self.synchronised, self.used = module, fault, True, set()
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), 0)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.mark_used)

    def mark_used(self, parameter):
        if self.synchronised or self.fault != "used without sync":
            self.used.add(id(parameter))

    def forward(self, *inputs):
        for buffer in self.module.buffers():
            dist.broadcast(buffer, 0)
        return self.module(*inputs)

    @contextmanager
    def no_sync(self):
        self.synchronised = False
        yield
        self.synchronised = True

    def finish(self):
        mixed = len({parameter.dtype for parameter in self.module.parameters()}) > 1
        used, self.used = self.used, set()
        for parameter in self.module.parameters():
            counts = torch.tensor(float(id(parameter) in used))
            dist.all_reduce(counts)
            if counts and not (mixed and self.fault == "frozen dtype"):
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(grad)
                parameter.grad = grad / dist.get_world_size()


@pytest.mark.parametrize(
    ("fault", "name", "tensor"),
    [
        ("used without sync", "parameters used without sync only", "early.weight"),
        ("frozen dtype", "a frozen layer of another dtype", "first.weight"),
    ],
)
def test_a_wrapper_that_leaves_gradients_out_is_rejected(world, fault, name, tensor):
    check_data_parallel(Averages, world, finish=Averages.finish)
    message = rf"^Averages, {name}: rank 0 holds \S+ at \(0, 0\) of the gradient of '{tensor}'[\s\S]*was never synchron"
    with pytest.raises(AssertionError, match=message):
        check_data_parallel(partial(Averages, fault=fault), world, finish=Averages.finish)


def test_no_parameter_is_used_without_sync_only_where_the_wrapper_promises_less(world):
    for less in ({"unused": False}, {"no_sync": False}):
        check_data_parallel(partial(Averages, fault="used without sync"), world, finish=Averages.finish, **less)
