"""The scenarios of check_data_parallel: a line in the table is tried, and its name is in the messages."""

from __future__ import annotations

import pytest
import torch

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
    fails = Scenario("a way that fails", layers, _fail, promised=NO_SYNC)
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
