"""A tensor that simulated ranks share and change causes a warning; tensors that they only read or own do not."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.errors import SharedTensorWarning
from pdlcheck.worlds import get_world


def run(program, world_size=2):
    """Return the warnings of a run."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        get_world("sim").run(program, world_size=world_size)
    return [str(one.message) for one in heard if one.category is SharedTensorWarning]


def add_up(tensor):
    dist.all_reduce(tensor)


def pass_on(tensor):
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)


def change_and_gather(tensor):
    tensor += dist.get_rank()
    dist.all_gather([torch.zeros(3) for _ in range(2)], tensor)


def gather_into(tensor):
    dist.all_gather([tensor, torch.zeros(3)], torch.ones(3))


def gather_into_what_another_sends(tensor):
    is_first = dist.get_rank() == 0
    dist.all_gather([tensor if is_first else torch.zeros(3), torch.zeros(3)], torch.ones(3) if is_first else tensor)


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (
            add_up,
            r"tensor, .*: ranks 0 and 1 in all_reduce\(SUM\) of float32 \(3,\), default .*test_shared_tensors.py:",
        ),
        (pass_on, r": rank 0 in send to rank 1 of float32 \(3,\), .*, rank 1 in recv from rank 0 of float32"),
        (change_and_gather, ": ranks 0 and 1 in all_gather of float32"),
        (gather_into, ": ranks 0 and 1 in all_gather of float32"),
        (gather_into_what_another_sends, ": ranks 0 and 1 in all_gather of float32"),
    ],
    ids=["all_reduce", "message", "changed between", "output", "output and input"],
)
def test_a_tensor_from_outside_is_told_of_and_one_of_each_rank_is_not(program, told):
    shared = torch.ones(3)
    (warning,) = run(lambda: program(shared))
    assert warning.endswith("name of the module gives each rank its own")
    with pytest.warns(SharedTensorWarning, match=told):
        get_world("sim").run(lambda: program(shared), world_size=2)
    assert run(lambda: program(torch.ones(3))) == []


def test_an_argument_is_each_ranks_own():
    with warnings.catch_warnings():
        warnings.simplefilter("error", SharedTensorWarning)
        get_world("sim").run(add_up, torch.ones(3), world_size=2)


def test_what_is_only_read_may_be_shared():
    shared = torch.ones(3)
    assert run(lambda: dist.all_gather([torch.zeros(3) for _ in range(2)], shared)) == []
    assert run(lambda: dist.broadcast(shared.clone(), 0)) == []


def test_processes_may_share_memory_too_and_nothing_is_in_an_empty_tensor():
    in_memory_of_processes, empty = torch.ones(3).share_memory_(), torch.ones(0)
    assert run(lambda: dist.all_reduce(in_memory_of_processes)) == []
    assert run(lambda: dist.all_reduce(empty)) == []


def accumulate(model, zero):
    for rank in range(2):
        if rank == dist.get_rank():
            if zero:
                model.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
        dist.barrier()


def test_a_gradient_that_ranks_add_up_in_one_tensor_is_told_of():
    model = nn.Linear(2, 1)
    assert run(lambda: accumulate(model, zero=True)) == []
    (warning,) = run(lambda: accumulate(model, zero=False))
    assert "rank 1 adds to the gradient of rank 0 of a tensor of shape (1" in warning
    assert "test_shared_tensors.py:" in warning
    assert run(lambda: [accumulate(one, zero=False) for one in [nn.Linear(2, 1)] * 2]) == []


def test_one_rank_has_what_it_has():
    shared = torch.ones(3)
    assert run(lambda: dist.all_reduce(shared), world_size=1) == []
