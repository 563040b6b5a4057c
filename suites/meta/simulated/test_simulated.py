"""The simulated world: torch.distributed as on real backends, and exact verdicts if ranks do not match."""

from __future__ import annotations

import os
import random
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pdlcheck.errors import CollectiveMismatch, Deadlock, Livelock
from pdlcheck.worlds import get_world
from pdlcheck.worlds.observe.callsite import user_frames

from ..every_world.programs import (
    EXPECTED,
    MISMATCHES,
    all_reduce,
    early_leaver,
    ring_of_pairs,
    ring_of_sends,
    train_ddp,
)


@pytest.fixture(scope="module")
def sim():
    return get_world("sim")


# -- what torch.distributed does ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("program", "expected"), EXPECTED, ids=[f.__name__ for f, _ in EXPECTED])
def test_c10d_gives_every_rank_what_it_should_under_every_schedule(program, expected, seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of names that it renames from release to release
        assert get_world("sim", seed=seed).run(program, world_size=4) == expected


def test_replicas_of_torchs_ddp_stay_bitwise_equal(sim):
    replicas = sim.run(train_ddp, world_size=3)
    for replica in replicas[1:]:
        assert all(torch.equal(a, b) for a, b in zip(replica, replicas[0], strict=True))


def test_fsdp2_gathers_what_a_single_process_would_hold(sim):
    def program():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        expected = model.weight.detach() - 0.1 * torch.ones(2, 4).sum(0).expand(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        model(torch.ones(2, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        return torch.allclose(model.weight.full_tensor(), expected)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert sim.run(program, world_size=2) == [True, True]


def test_dtensor_shards_in_two_dimensions_and_comes_back_whole(sim):
    def program():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        whole = torch.arange(16.0).view(4, 4)
        mesh = init_device_mesh("cpu", (2, 2))
        part = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        back = part.redistribute(mesh, [Replicate(), Replicate()]).to_local()
        return tuple(part.to_local().shape), torch.equal(back, whole)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert sim.run(program, world_size=4) == [((2, 2), True)] * 4


def test_a_pipeline_of_torch_has_the_gradients_of_one_process(sim):
    def layer(stage):
        torch.manual_seed(stage)
        return torch.nn.Linear(4, 4)

    x, y = torch.ones(8, 4), torch.zeros(8, 4)
    whole = torch.nn.Sequential(*map(layer, range(3)))
    torch.nn.functional.mse_loss(whole(x), y).backward()

    def program():
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        rank = dist.get_rank()
        stage = PipelineStage(layer(rank), rank, 3, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss)
        schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank == 2 else {}))
        return stage.submod.weight.grad

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part, gradient in zip(whole, sim.run(program, world_size=3), strict=True):
            torch.testing.assert_close(gradient, part.weight.grad)


def test_uneven_inputs_of_ddp_end_together(sim):
    def program():
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        with ddp.join():
            for _ in range(dist.get_rank() + 1):
                ddp(torch.ones(1, 2)).sum().backward()
        return True

    assert sim.run(program, world_size=4) == [True] * 4


# -- verdicts -------------------------------------------------------------------------------------


def test_a_ring_that_sends_first_is_a_deadlock_with_its_cycle(sim):
    with pytest.raises(Deadlock) as caught:
        sim.run(ring_of_sends, world_size=3)
    assert len(caught.value.ranks) == 3
    assert sorted(caught.value.cycle) == [0, 1, 2]
    for rank, line in enumerate(caught.value.ranks):
        assert f"rank {rank}: blocked in send to rank {(rank + 1) % 3} of float32 (3,)" in line
        assert "programs.py:" in line
    sim.run(ring_of_pairs, world_size=3)


def test_a_rank_that_leaves_early_is_named(sim):
    with pytest.raises(Deadlock, match="rank 1 has returned and will not take part"):
        sim.run(early_leaver, world_size=3)


def test_a_rank_that_asks_for_ever_is_a_livelock(sim):
    def program(sender_comes):
        if dist.get_rank() == 0:
            work = dist.irecv(torch.zeros(1), 1)
            while not work.is_completed():
                pass
        elif sender_comes:
            dist.send(torch.ones(1), 0)

    with pytest.raises(Livelock, match="rank 0: asks for recv from rank 1") as caught:
        sim.run(program, False, world_size=2)
    assert caught.value.polls == 20_000
    assert len(caught.value.ranks) == 1  # rank 1 has returned
    sim.run(program, True, world_size=2)


@pytest.mark.parametrize(("what", "program"), MISMATCHES, ids=[what for what, _ in MISMATCHES])
def test_ranks_that_do_not_fit_are_reported_side_by_side(sim, what, program):
    with pytest.raises(CollectiveMismatch, match=what) as caught:
        sim.run(program, world_size=2)
    assert [line[:7] for line in caught.value.ranks] == ["rank 0:", "rank 1:"]
    assert all("programs.py:" in line for line in caught.value.ranks)


def test_two_ranks_that_came_late_are_compared_with_each_other():
    def exchange():
        given = {0: [1, 1, 1], 1: [1, 1, 2], 2: [1, 1, 1]}[dist.get_rank()]
        inputs = [torch.ones(n) for n in given]
        dist.all_to_all([torch.zeros(1) for _ in range(3)], inputs)

    with pytest.raises(CollectiveMismatch, match="rank 1 sends 2 elements to rank 2 in all_to_all, rank 2 has room"):
        get_world("sim", schedule="first").run(exchange, world_size=3)


def test_the_frames_of_a_rank_are_the_programs_alone(sim):
    def inner():
        return list(user_frames())

    (frames,) = sim.run(lambda: [frame.f_code.co_name for frame in inner()], world_size=1)
    assert [name for name in frames if name != "<listcomp>"] == ["inner", "<lambda>"]  # Python 3.12 has no such frames


def test_the_first_cause_is_raised_and_the_others_are_told(sim):
    def program():
        if dist.get_rank() == 1:
            raise KeyError("lost")
        dist.barrier()

    with pytest.raises(KeyError, match="lost") as caught:
        sim.run(program, world_size=3)
    assert caught.value.__notes__[0] == "rank 1 of 3 raised this"
    assert caught.value.__notes__[1].startswith("ranks 0, 2 were stopped in barrier")


def test_failures_of_one_line_are_merged_and_others_are_shown_in_full(sim):
    def program():
        rank = dist.get_rank()
        dist.all_reduce(torch.ones(2))
        if rank == 4:
            raise KeyError("another kind")
        if rank > 0:
            raise ValueError(f"my rank is {rank}" if rank < 3 else "a high rank")
        dist.barrier()

    with pytest.raises(ValueError, match="my rank is 1") as caught:
        sim.run(program, world_size=6)
    story = "\n".join(caught.value.__notes__)
    last = "; last operation all_reduce(SUM) of float32 (2,), default group (ranks 0-5), collective 0, at "
    assert "rank 0 was stopped in barrier, default group (ranks 0-5), collective 1, at " in story
    assert story.count("test_simulated.py") >= 5
    assert str(caught.value) == "my rank is 1"
    assert f"failed at the same line: my rank is 2{last}" in story
    assert f"ranks 3, 5 failed at the same line: a high rank{last}" in story
    assert f"rank 4 raised KeyError: 'another kind'{last}" in story
    assert story.count("Traceback (most recent call last)") == 1


def test_a_world_is_fit_for_use_after_a_failure(sim):
    with sim.open(2) as ranks:
        with pytest.raises(Deadlock):
            ranks.run(ring_of_sends)
        assert ranks.run(all_reduce) == [3.0, 3.0]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda xs, root: dist.gather(torch.zeros(1), xs[:1] if root else None), "gather needs 2 outputs"),
        (lambda xs, root: dist.gather(torch.zeros(2), xs if root else None), "gather needs tensors of one shape"),
        (lambda xs, root: dist.scatter(torch.zeros(1), xs[:1] if root else None), "scatter needs 2 inputs"),
        (lambda xs, root: dist.scatter(torch.zeros(2), xs if root else None), "scatter needs tensors of one shape"),
    ],
)
def test_a_list_that_does_not_fit_is_refused_on_the_rank_that_gives_it(sim, call, said):
    with pytest.raises(RuntimeError, match=said):
        sim.run(lambda: call([torch.zeros(1), torch.zeros(1)], dist.get_rank() == 0), world_size=2)


def test_ranks_end_with_the_block_that_opened_them(sim):
    with sim.open(2) as ranks:
        assert ranks.run(all_reduce) == [3.0, 3.0]
    assert not ranks.intact
    with pytest.raises(RuntimeError, match=r"`with world.open\(...\) as ranks:`, which has ended; open new ones"):
        ranks.run(all_reduce)


# -- schedules and isolation ----------------------------------------------------------------------


def arrival_order():
    """Return the order of arrival, which depends on the schedule."""
    if dist.get_rank():
        dist.send(torch.zeros(1), 0)
        return None
    return [dist.recv(torch.zeros(1)) for _ in range(dist.get_world_size() - 1)]


def test_a_seed_replays_its_schedule_and_seeds_differ():
    orders = [[get_world("sim", seed=seed).run(arrival_order, world_size=4)[0] for _ in range(3)] for seed in range(8)]
    assert all(first == second == third for first, second, third in orders)
    assert len({tuple(first) for first, _, _ in orders}) > 1


def test_every_rank_has_random_streams_of_its_own_that_do_not_touch_the_controllers(sim):
    def program():
        drawn = [torch.rand(1).item(), random.random(), np.random.rand()]
        dist.barrier()
        return [*drawn, torch.rand(1).item(), random.random(), np.random.rand()]

    torch.manual_seed(5)
    np.random.seed(5)
    expected, of_numpy = torch.rand(1), np.random.rand()
    torch.manual_seed(5)
    np.random.seed(5)
    first, second = sim.run(program, world_size=2), get_world("sim", seed=0).run(program, world_size=2)
    assert torch.equal(torch.rand(1), expected)
    assert np.random.rand() == of_numpy
    assert first == second
    assert len({value for rank in first for value in rank}) == 12


def test_a_seed_of_a_rank_is_not_for_the_devices_whose_streams_are_the_controllers(sim, monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.manual_seed(5)

    def program():
        generator = torch.manual_seed(7 + dist.get_rank())
        return generator.initial_seed(), torch.rand(1).item()

    found = sim.run(program, world_size=2)
    torch.random.manual_seed(6)
    assert seeds == [5, 6]
    assert found == [(seed, torch.rand(1, generator=torch.Generator().manual_seed(seed)).item()) for seed in (7, 8)]
    with pytest.raises(ValueError, match="invalid literal"):
        sim.run(lambda: torch.manual_seed("x"), world_size=1)


def test_the_second_of_two_normal_numbers_outlives_the_turn_in_which_it_was_drawn(sim):
    """Python and numpy draw two numbers at a time and keep one for the next call."""

    def draws(meet):
        np.random.seed(dist.get_rank())
        random.seed(dist.get_rank())
        first = np.random.randn(), random.gauss(0, 1)
        if meet:
            dist.barrier()
        return first, np.random.randn(), random.gauss(0, 1)

    np.random.seed(5)
    np.random.randn()
    following = np.random.randn()
    np.random.seed(5)
    np.random.randn()
    assert sim.run(draws, True, world_size=3) == sim.run(draws, False, world_size=3)
    assert np.random.randn() == following


def test_every_rank_has_its_launchers_environment_and_default_dtype(sim):
    def program():
        if dist.get_rank() == 0:
            torch.set_default_dtype(torch.float64)
        dist.barrier()
        return os.environ["RANK"], os.environ["WORLD_SIZE"], torch.zeros(1).dtype

    before = dict(os.environ)
    assert sim.run(program, world_size=2) == [("0", "2", torch.float64), ("1", "2", torch.float32)]
    assert dict(os.environ) == before
    assert torch.get_default_dtype() == torch.float32


def test_arguments_are_copied_for_every_rank(sim):
    def add_rank(x):
        return x.add_(dist.get_rank())

    x = torch.zeros(1)
    assert [y.item() for y in sim.run(add_rank, x, world_size=3)] == [0.0, 1.0, 2.0]
    assert x.item() == 0.0


def test_a_hundred_runs_leave_no_thread_and_no_process_group(sim):
    sim.run(all_reduce, world_size=2)  # the world keeps these ranks
    before = threading.active_count()
    for _ in range(100):
        sim.run(all_reduce, world_size=2)
    assert threading.active_count() == before
    assert not dist.is_initialized()


@given(values=st.lists(st.integers(-100, 100), min_size=1, max_size=6))
def test_a_property_of_the_world_itself(values):
    def program(values):
        x = torch.tensor([values[dist.get_rank()]])
        dist.all_reduce(x)
        return x.item()

    assert get_world("sim").run(program, values, world_size=len(values)) == [sum(values)] * len(values)


# -- wrong arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_world_size_below_one_is_refused(sim, world_size):
    with pytest.raises(ValueError, match=f"world_size must be at least 1, got {world_size}"):
        sim.run(all_reduce, world_size=world_size)


@pytest.mark.parametrize("world_size", [10_001, 10**30])
def test_a_world_size_that_nobody_can_mean_is_refused(sim, world_size):
    with pytest.raises(ValueError, match=f"world_size must be at most 10000, got {world_size}"):
        sim.run(all_reduce, world_size=world_size)


@pytest.mark.parametrize("world_size", [2.0, "2", True])
def test_a_world_size_that_is_no_int_is_refused(sim, world_size):
    with pytest.raises(TypeError, match="world_size must be an int"):
        sim.run(all_reduce, world_size=world_size)


def test_an_unknown_world_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="world must be one of gloo, mpi, nccl, ray, sim; got 'slurm'"):
        get_world("slurm")


def test_a_world_inside_a_rank_is_refused(sim):
    with pytest.raises(RuntimeError, match=r"called inside a simulated rank.*; remove the marker, checks and"):
        sim.run(lambda: get_world("sim").run(all_reduce, world_size=2), world_size=1)


async def never_awaited():
    raise AssertionError("it runs")


def never_iterated():
    raise AssertionError("it runs")
    yield


@pytest.mark.parametrize("fn", [never_awaited, never_iterated])
def test_a_function_whose_body_does_not_run_is_refused_as_on_processes(sim, fn):
    words = "rank . returned a (generator|coroutine) that cannot be sent to the controller: the body .* has not run"
    with pytest.raises(TypeError, match=words):
        sim.run(fn, world_size=2)


class Unspeakable(Exception):
    def __str__(self):
        return self.no_such_attribute


@pytest.mark.parametrize("raising", [1, 2])
def test_an_exception_that_cannot_say_what_it_is_stays_the_cause(sim, raising):
    def program():
        if dist.get_rank() < raising:
            raise Unspeakable
        dist.barrier()

    with pytest.raises(Unspeakable) as caught:
        sim.run(program, world_size=2)
    ranks = ["rank 0 of 2", "ranks 0, 1 of 2"][raising - 1]
    assert caught.value.__notes__[0] == f"{ranks} raised this"
