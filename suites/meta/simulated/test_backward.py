"""Backward passes of simulated ranks that reach the same parameters."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pdlcheck.errors import Unsupported
from pdlcheck.worlds import get_world
from pdlcheck.worlds.simulated.process_state import backward


def train(model):
    model.zero_grad()
    ranks = DistributedDataParallel(model)
    ranks(torch.full((3, 2), float(dist.get_rank()))).sum().backward()
    return model.weight.grad.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_a_model_that_ranks_share_is_refused_and_one_of_its_own_trains(seed):
    world, shared = get_world("sim", seed=seed), nn.Linear(2, 1)
    with pytest.raises(Unsupported, match=r"of shape \(.*\) at .*test_backward.py:23, and so does rank \d: simulated"):
        world.run(lambda: train(shared), world_size=2)
    assert backward._accumulating == {}
    assert world.run(lambda: train(nn.Linear(2, 1)), world_size=2) == [[[1.5, 1.5]]] * 2


def test_a_tensor_that_ranks_share_is_refused_as_the_beginning_of_a_pass_too():
    shared = torch.ones(1, requires_grad=True)

    def program():
        if dist.get_rank() == 0:
            shared.register_hook(lambda gradient: dist.barrier())
        dist.barrier()
        shared.backward()

    with pytest.raises(Unsupported, match=r"of a tensor of shape \(1,\)"):
        get_world("sim").run(program, world_size=2)


def test_ranks_may_compute_gradients_of_a_global_model_one_after_the_other():
    shared = nn.Linear(2, 1)

    def program():
        for rank in range(2):
            if rank == dist.get_rank():
                shared.zero_grad()
                shared(torch.ones(1, 2)).sum().backward()
            dist.barrier()
        return shared.weight.grad.tolist()

    assert get_world("sim").run(program, world_size=2) == [[[1.0, 1.0]]] * 2


def test_a_pass_may_start_another_over_the_same_parameters():
    def program():
        model = nn.Linear(2, 2)
        twice = checkpoint(model, model(torch.ones(1, 2)), use_reentrant=True)
        twice.sum().backward()
        x = torch.ones(1, requires_grad=True)
        x.backward()
        return model.weight.grad.shape, x.grad.item()

    assert get_world("sim").run(program, world_size=2) == [((2, 2), 1.0)] * 2
    assert backward._accumulating == {}


def test_gradients_that_are_returned_are_no_parameters():
    weight = torch.ones(2, requires_grad=True)

    def program():
        seen = []

        def communicate(gradient):
            total = gradient.clone()
            dist.all_reduce(total)
            seen.append(total.tolist())

        x = weight * 2
        x.register_hook(communicate)
        torch.autograd.grad(x.sum(), x)
        return seen

    assert get_world("sim").run(program, world_size=2) == [[[2.0, 2.0]]] * 2


def test_a_pass_may_begin_at_edges_and_twice_at_one_leaf():
    def program():
        x, leaf = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
        end = (x * 3).sum()
        torch.autograd.backward((get_gradient_edge(end), get_gradient_edge(x)), (torch.ones(()), torch.ones(2)))
        torch.autograd.backward((leaf, leaf), (torch.ones(1), torch.ones(1)))
        return x.grad.tolist(), leaf.grad.item()

    assert get_world("sim").run(program, world_size=2) == [([4.0, 4.0], 2.0)] * 2
    assert backward._accumulating == {}


def test_a_shared_parameter_is_found_behind_an_edge():
    shared = torch.ones(2, requires_grad=True)

    def program():
        x = shared * 2
        x.register_hook(lambda gradient: dist.barrier())
        torch.autograd.backward(get_gradient_edge(x.sum()))

    with pytest.raises(Unsupported, match=r"of a tensor of shape \(2,\)"):
        get_world("sim").run(program, world_size=2)


def test_no_garbage_is_collected_in_hooks():
    """A DDP's Logger locks its reducer when it dies; inside a hook of that reducer it would wait for ever.

    The Logger dies there if a test has failed between the passes of a DDP, and the next test wraps the same model
    again.
    """
    seen = []

    def look(gradient):
        dist.barrier()  # other ranks run meanwhile
        seen.append(gc.isenabled())

    def fail(gradient):
        raise ValueError("in a hook")

    def program():
        x = torch.ones(1, requires_grad=True)
        x.register_hook(look)
        checkpoint(lambda y: 2 * y, x, use_reentrant=True).backward()  # a pass inside a pass
        dist.barrier()
        seen.append(gc.isenabled())
        dist.barrier()
        x.register_hook(fail)
        x.backward()

    world = get_world("sim")
    with pytest.raises(ValueError, match="in a hook"):
        world.run(program, world_size=2)
    assert seen[:4] == [False, False, True, True]
    assert (gc.isenabled(), backward._passes) == (True, 0)
    gc.disable()
    try:
        world.run(lambda: torch.ones(1, requires_grad=True).backward(), world_size=2)
        assert not gc.isenabled()
    finally:
        gc.enable()
