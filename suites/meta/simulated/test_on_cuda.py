"""Simulated ranks whose tensors are on a CUDA device: one that they share."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_pipeline
from pdlcheck.errors import CollectiveMismatch, Deadlock
from pdlcheck.primitives import Pipeline
from pdlcheck.worlds import get_world

from ..checks.layers_by_hand import Copy
from ..processes.data_parallel_steps import OPTIONS, WRAPPERS, ddp_step, ddp_steps

pytestmark = pytest.mark.gpu


@pytest.fixture
def sim():
    return get_world("sim", device="cuda")


@WRAPPERS
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_of_ddp(sim, world_size, wrapper):
    mean = world_size + 1.0
    assert sim.run(ddp_step, wrapper, "cuda", world_size=world_size) == [([[mean] * 3], True)] * world_size


@WRAPPERS
@OPTIONS
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_steps_of_ddp_are_those_of_the_plain_model(sim, world_size, wrapper, options):
    for away, alike in sim.run(ddp_steps, wrapper, "cuda", options, world_size=world_size):
        assert away < 1e-12
        assert alike


def test_every_rank_goes_backward_in_its_own_turn(sim):
    """The single thread of torch for a device would make the ranks' hooks wait for one another."""

    def body() -> float:
        x = torch.tensor([dist.get_rank() + 1.0], device="cuda", requires_grad=True)
        (Copy.apply(x) * (dist.get_rank() + 1.0)).sum().backward()
        return x.grad.item()

    assert sim.run(body, world_size=3) == [6.0] * 3


def test_messages_and_collectives(sim):
    def body() -> tuple[list[float], list[float], float]:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        mine = torch.full((2,), float(rank), device="cuda")
        parts = [torch.empty(2, device="cuda") for _ in range(world_size)]
        dist.all_gather(parts, mine)
        dist.broadcast(mine, 1)
        around = torch.tensor([float(rank)], device="cuda")
        others = torch.empty(1, device="cuda")
        works = [dist.isend(around, (rank + 1) % world_size), dist.irecv(others, (rank - 1) % world_size)]
        for work in works:
            work.wait()
        return mine.tolist(), torch.cat(parts).tolist(), others.item()

    expected = [([1.0, 1.0], [0.0, 0.0, 1.0, 1.0, 2.0, 2.0], float((rank - 1) % 3)) for rank in range(3)]
    assert sim.run(body, world_size=3) == expected


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipeline_over_ranks(sim, schedule):
    loss = nn.MSELoss()

    def start(model):
        pipeline = Pipeline(model, loss, schedule=schedule, n_microbatches=4, device="cuda", recompute=True)

        def step(inputs, targets):
            result = pipeline.step(inputs.cuda(), targets.cuda())
            return result.loss, result.outputs

        return pipeline.module, step

    def make():
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

    batch = torch.rand(9, 3, dtype=torch.float64), torch.rand(9, 2, dtype=torch.float64)
    check_pipeline(start, make, loss, [batch], sim, world_size=2, n_microbatches=4)


def test_ranks_draw_numbers_of_their_own_which_repeat(sim):
    def body(seed: int | None = None) -> list[list[float]]:
        if seed is not None:
            torch.manual_seed(seed)
        drawn = []
        for _ in range(2):
            drawn.append(torch.rand(3, device="cuda").tolist())
            dist.barrier()
        return drawn

    torch.manual_seed(3)
    expected = torch.rand(3, device="cuda").tolist()
    torch.manual_seed(3)
    first = sim.run(body, world_size=2)
    assert first == sim.run(body, world_size=2)
    assert first[0][0] != first[1][0]
    assert first[0][0] != first[0][1]
    assert sim.run(functools.partial(body, 3), world_size=2) == [[expected, second_three(3)]] * 2
    assert torch.rand(3, device="cuda").tolist() == expected, "the controller's stream has gone on"


def second_three(seed: int) -> list[float]:
    """Return the second three numbers of a seed, drawn from a separate generator."""
    generator = torch.Generator("cuda").manual_seed(seed)
    torch.rand(3, device="cuda", generator=generator)
    return torch.rand(3, device="cuda", generator=generator).tolist()


def test_what_goes_wrong_is_told_as_on_the_cpu(sim):
    def unlike() -> None:
        dist.all_reduce(torch.ones(dist.get_rank() + 1, device="cuda"))

    def alone() -> None:
        if dist.get_rank():
            dist.barrier()

    with pytest.raises(CollectiveMismatch, match=r"float32 \(2,\)"):
        sim.run(unlike, world_size=2)
    with pytest.raises(Deadlock):
        sim.run(alone, world_size=2)


def test_pytest_on_the_simulated_cluster(pytester):
    pytester.makepyfile(
        """
        import pytest
        import torch
        import torch.distributed as dist

        @pytest.mark.world_size(2, 4)
        def test_sum(rank, world_size, device):
            assert str(device) == "cuda:0"
            x = torch.tensor([rank + 1.0], device=device)
            dist.all_reduce(x)
            assert x.item() == world_size * (world_size + 1) / 2
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--world", "sim", "--rank-device", "cuda")
    result.assert_outcomes(passed=2)
