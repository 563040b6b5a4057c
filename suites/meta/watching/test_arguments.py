"""Wrong arguments of pdlcheck.watch, and ranks that do not watch alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pdlcheck
from pdlcheck.errors import Deadlock
from pdlcheck.worlds import get_world

from .trainings import adam, ddp, linears, plain_sgd

SIM = get_world("sim")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": [1]}, TypeError, r"watch takes as model an nn.Module, got \[1\]"),
        ({"optimizer": None}, TypeError, "watch takes as optimizer one of torch.optim, or a list of them, got None"),
        ({"optimizer": []}, TypeError, "watch takes as optimizer one of torch.optim"),
        ({"every": 0}, ValueError, "every must be a number of steps, 1 or more, or None, got 0"),
        ({"every": True}, ValueError, "got True"),
        ({"every": 2.0}, ValueError, "got 2.0"),
        ({"on_violation": "print"}, ValueError, "on_violation must be 'raise', 'warn' or a function, got 'print'"),
        ({"scaler": 2.0}, TypeError, r"scaler must have state_dict\(\), as a GradScaler has, got 2.0"),
        ({"streams": {"torch": "same"}}, ValueError, "to 'equal' or 'different', got 'torch': 'same'"),
        ({"streams": {"tensor": "equal"}}, ValueError, "streams maps 'cuda', 'numpy', 'python', 'torch' to"),
        ({"same_samples": [[0], [0, 1]]}, ValueError, r"same_samples has disjoint sets of the ranks \[0, 1\]"),
        ({"same_samples": [[2]]}, ValueError, r"got \[\[2\]\]"),
        ({"timeout_s": 0}, ValueError, "timeout_s must be above 0, got 0"),
    ],
)
def test_a_wrong_argument_is_refused(arguments, error, message):
    def call():
        model = nn.Linear(2, 1)
        pdlcheck.watch(**{"model": model, "optimizer": plain_sgd(model), **arguments})

    with pytest.raises(error, match=message):
        SIM.run(call, world_size=2)


def test_a_process_group_is_needed():
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="call init_process_group before it"):
        pdlcheck.watch(model, plain_sgd(model))


def test_flat_parameters_of_fsdp1_are_refused():
    model = nn.Module()
    model.register_parameter("_flat_param", nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match=r"watch cannot compare FSDP1.*use fully_shard"):
        pdlcheck.watch(model, plain_sgd(model))


def test_arguments_that_differ_between_ranks_are_refused_on_every_rank():
    def call():
        model = nn.Linear(2, 1)
        with pytest.raises(ValueError, match="arguments on every rank: rank 1 has every=11, rank 0 has 10"):
            pdlcheck.watch(model, plain_sgd(model), every=10 + dist.get_rank())

    SIM.run(call, world_size=3)


def test_a_rank_without_a_watcher_leaves_the_others_waiting():
    """On processes, they wait for ``timeout_s``."""

    def call():
        model = ddp(linears())
        optimizer = adam(model)
        if dist.get_rank() != 1:
            pdlcheck.watch(model, optimizer)
        model(torch.ones(2, 4)).sum().backward()

    with pytest.raises(Deadlock, match=r"rank 0: blocked in .*new_group"):
        SIM.run(call, world_size=2)


def test_ranks_with_other_numbers_of_steps_deadlock():
    """On processes, the rank in the comparison raises an error after ``timeout_s``."""

    def call():
        torch.manual_seed(0)
        model = ddp(linears())
        optimizer = adam(model)
        pdlcheck.watch(model, optimizer, every=2)
        for step in range(3):
            model(torch.ones(2, 4)).sum().backward()
            if not (step == 1 and dist.get_rank() == 1):
                optimizer.step()

    with pytest.raises(Deadlock, match=r"rank 0: blocked in all_reduce.*at .*watching"):
        SIM.run(call, world_size=2)


def hangs():
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = plain_sgd(model)
    pdlcheck.watch(model, optimizer, every=1, timeout_s=1)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as raised:
            optimizer.step()
        return raised.value.__notes__
    return dist.get_rank()


@pytest.mark.slow
def test_a_rank_on_processes_waits_for_a_limited_time():
    notes, _ = get_world("gloo", watch=False).run(hangs, world_size=2)
    assert notes[0].startswith("pdlcheck.watch compared the ranks at step 0. It waits 1 s for all ranks of its group.")


def test_several_optimizers():
    def call():
        torch.manual_seed(0)
        model = linears()
        first, second = adam(model[0]), adam(model[2])
        with pdlcheck.watch(model, [first, second], every=1, on_violation=lambda error: None) as watcher:
            model(torch.ones(2, 4)).sum().backward()
            second.step()
            assert watcher.steps == 0
            second.param_groups[0]["lr"] += dist.get_rank()
            first.step()
        return watcher.violation.tensor, watcher.steps

    assert SIM.run(call, world_size=2) == [("'lr' of group 0 of optimizer 1", 1)] * 2


def test_a_wrapped_optimizer_is_unwrapped():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

    def call():
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        inner = plain_sgd(model)
        with pdlcheck.watch(model, Wrapper(inner)) as watcher:
            inner.step()
        return watcher.steps

    assert SIM.run(call, world_size=2) == [1, 1]


def test_other_names_of_the_package_are_missing():
    with pytest.raises(AttributeError, match="module 'pdlcheck' has no attribute 'watcher'"):
        pdlcheck.watcher  # noqa: B018
