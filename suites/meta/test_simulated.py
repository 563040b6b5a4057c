"""The simulated world: torch.distributed as it is on real backends, and exact verdicts where ranks do not fit."""

from __future__ import annotations

import os
import random
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.errors import CollectiveMismatch, Deadlock
from pdlcheck.worlds import get_world


@pytest.fixture(scope="module")
def sim():
    return get_world("sim")


# -- what torch.distributed does ------------------------------------------------------------------


def all_reduce():
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()


def all_gather():
    out = [torch.zeros(2) for _ in range(dist.get_world_size())]
    dist.all_gather(out, torch.full((2,), float(dist.get_rank())))
    return torch.cat(out).tolist()


def all_gather_flat():
    out = torch.zeros(2 * dist.get_world_size())
    dist.all_gather_into_tensor(out, torch.full((2,), float(dist.get_rank())))
    return out.tolist()


def reduce_scatter():
    out = torch.zeros(1)
    dist.reduce_scatter(out, list(torch.arange(4.0).split(1)))
    return out.item()


def reduce_scatter_flat():
    out = torch.zeros(1)
    dist.reduce_scatter_tensor(out, torch.arange(4.0))
    return out.item()


def all_to_all():
    out = torch.zeros(4)
    dist.all_to_all_single(out, torch.arange(4.0) + 10 * dist.get_rank())
    return out.tolist()


def all_to_all_uneven():
    rank, sizes = dist.get_rank(), [1, 2, 3, 4]
    out = torch.zeros(sum(sizes))
    dist.all_to_all_single(out, torch.full((4 * (rank + 1),), float(rank)), sizes, [rank + 1] * 4)
    return out.tolist()


def gather():
    out = [torch.zeros(1) for _ in range(4)] if dist.get_rank() == 1 else None
    dist.gather(torch.tensor([float(dist.get_rank())]), out, dst=1)
    return torch.cat(out).tolist() if out else None


def scatter():
    out = torch.zeros(1)
    dist.scatter(out, list(torch.arange(4.0).split(1)) if dist.get_rank() == 2 else None, src=2)
    return out.item()


def broadcast():
    x = torch.tensor([float(dist.get_rank())])
    dist.broadcast(x, 2)
    return x.item()


def reduce_max():
    x = torch.tensor([float(dist.get_rank())])
    dist.reduce(x, 2, op=dist.ReduceOp.MAX)
    return x.item() if dist.get_rank() == 2 else None


def objects():
    gathered: list[object] = [None] * 4
    dist.all_gather_object(gathered, {"rank": dist.get_rank()})
    sent = [dist.get_rank()]
    dist.broadcast_object_list(sent, src=1)
    return gathered, sent


def ring_in_batches():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x, y = torch.tensor([float(rank)]), torch.zeros(1)
    ops = [
        dist.P2POp(dist.isend, x, (rank + 1) % world_size),
        dist.P2POp(dist.irecv, y, (rank - 1) % world_size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return y.item()


def from_any_rank():
    if dist.get_rank():
        dist.send(torch.tensor([float(dist.get_rank())]), 0)
        return None
    x = torch.zeros(1)
    return sorted((dist.recv(x), x.item()) for _ in range(3))


def tags_out_of_order():
    x = torch.zeros(1)
    if dist.get_rank() == 0:
        works = [dist.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in (1, 2)]
        for work in works:
            work.wait()
    elif dist.get_rank() == 1:
        seen = []
        for tag in (2, 1):
            dist.recv(x, 0, tag=tag)
            seen.append(x.item())
        return seen
    return None


def sub_group():
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, group=group)
    return x.item(), dist.get_rank(group), dist.get_process_group_ranks(group)


def coalesced():
    a, b = torch.ones(2), torch.ones(3)
    with dist._coalescing_manager():
        dist.all_reduce(a)
        dist.all_reduce(b)
    return a.tolist() + b.tolist()


def asynchronous():
    x = torch.ones(1)
    future = dist.all_reduce(x, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].item() * 2).wait()


def average():
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    return x.item()


EXPECTED = [
    (all_reduce, [10.0] * 4),
    (all_gather, [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]] * 4),
    (all_gather_flat, [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]] * 4),
    (reduce_scatter, [0.0, 4.0, 8.0, 12.0]),
    (reduce_scatter_flat, [0.0, 4.0, 8.0, 12.0]),
    (all_to_all, [[r, r + 10.0, r + 20.0, r + 30.0] for r in range(4)]),
    (all_to_all_uneven, [[0.0] + [1.0] * 2 + [2.0] * 3 + [3.0] * 4] * 4),
    (gather, [None, [0.0, 1.0, 2.0, 3.0], None, None]),
    (scatter, [0.0, 1.0, 2.0, 3.0]),
    (broadcast, [2.0] * 4),
    (reduce_max, [None, None, 3.0, None]),
    (objects, [([{"rank": r} for r in range(4)], [1])] * 4),
    (ring_in_batches, [3.0, 0.0, 1.0, 2.0]),
    (from_any_rank, [[(1, 1.0), (2, 2.0), (3, 3.0)], None, None, None]),
    (tags_out_of_order, [None, [2.0, 1.0], None, None]),
    (sub_group, [None, (4.0, 0, [1, 3]), None, (4.0, 1, [1, 3])]),
    (coalesced, [[4.0] * 5] * 4),
    (asynchronous, [8.0] * 4),
    (average, [1.5] * 4),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("program", "expected"), EXPECTED, ids=[f.__name__ for f, _ in EXPECTED])
def test_c10d_gives_every_rank_what_it_should_under_every_schedule(program, expected, seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of names that it renames from release to release
        assert get_world("sim", seed=seed).run(program, world_size=4) == expected


def train_ddp():
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 1))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.00005)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


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


# -- verdicts -------------------------------------------------------------------------------------


def ring_of_sends():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x, y = torch.ones(3), torch.zeros(3)
    dist.send(x, (rank + 1) % world_size)
    dist.recv(y, (rank - 1) % world_size)


def ring_of_pairs():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x, y = torch.ones(3), torch.zeros(3)
    sending = dist.isend(x, (rank + 1) % world_size)
    dist.recv(y, (rank - 1) % world_size)
    sending.wait()


def test_a_ring_that_sends_first_is_a_deadlock_with_its_cycle(sim):
    with pytest.raises(Deadlock) as caught:
        sim.run(ring_of_sends, world_size=3)
    assert len(caught.value.ranks) == 3
    assert sorted(caught.value.cycle) == [0, 1, 2]
    for rank, line in enumerate(caught.value.ranks):
        assert f"rank {rank}: blocked in send to rank {(rank + 1) % 3} of float32 (3,)" in line
        assert "test_simulated.py:" in line
    sim.run(ring_of_pairs, world_size=3)


def test_a_rank_that_leaves_early_is_named(sim):
    def program():
        for _ in range(2 if dist.get_rank() == 1 else 3):
            dist.barrier()

    with pytest.raises(Deadlock, match="rank 1 has returned and will not take part"):
        sim.run(program, world_size=3)


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("the shape", lambda r: dist.all_reduce(torch.ones(2 + r))),
        ("the dtype", lambda r: dist.all_reduce(torch.ones(2, dtype=torch.float32 if r else torch.int32))),
        ("the reduce-op", lambda r: dist.all_reduce(torch.ones(2), op=[dist.ReduceOp.SUM, dist.ReduceOp.MAX][r])),
        ("the root", lambda r: dist.broadcast(torch.ones(2), src=r)),
        ("the operation", lambda r: dist.all_reduce(torch.ones(2)) if r else dist.barrier()),
        (
            "the number of elements",
            lambda r: dist.send(torch.ones(3), 1) if r == 0 else dist.recv(torch.ones(2), 0),
        ),
    ],
    ids=["shape", "dtype", "reduce-op", "root", "operation", "message"],
)
def test_ranks_that_do_not_fit_are_reported_side_by_side(sim, what, call):
    with pytest.raises(CollectiveMismatch, match=what) as caught:
        sim.run(lambda: call(dist.get_rank()), world_size=2)
    assert [line[:7] for line in caught.value.ranks] == ["rank 0:", "rank 1:"]
    assert all("test_simulated.py:" in line for line in caught.value.ranks)


def test_the_first_cause_is_raised_and_the_others_are_told(sim):
    def program():
        if dist.get_rank() == 1:
            raise KeyError("lost")
        dist.barrier()

    with pytest.raises(KeyError, match="lost") as caught:
        sim.run(program, world_size=3)
    assert caught.value.__notes__[0] == "rank 1 of 3 raised this"
    assert caught.value.__notes__[1].startswith("rank 0 was stopped in barrier")


def test_a_world_is_fit_for_use_after_a_failure(sim):
    with sim.open(2) as ranks:
        with pytest.raises(Deadlock):
            ranks.run(ring_of_sends)
        assert ranks.run(all_reduce) == [3.0, 3.0]


# -- schedules and isolation ----------------------------------------------------------------------


def arrival_order():
    """Depends on the schedule: who is received first."""
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
        drawn = [torch.rand(1).item(), random.random()]
        dist.barrier()
        return [*drawn, torch.rand(1).item(), random.random()]

    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = sim.run(program, world_size=2), get_world("sim", seed=0).run(program, world_size=2)
    assert torch.equal(torch.rand(1), expected)
    assert first == second
    assert len({value for rank in first for value in rank}) == 8


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


@pytest.mark.parametrize("world_size", [2.0, "2", True])
def test_a_world_size_that_is_no_int_is_refused(sim, world_size):
    with pytest.raises(TypeError, match="world_size must be an int"):
        sim.run(all_reduce, world_size=world_size)


def test_an_unknown_world_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="world must be one of gloo, sim; got 'slurm'"):
        get_world("slurm")


def test_a_world_inside_a_rank_is_refused(sim):
    with pytest.raises(RuntimeError, match="called inside a simulated rank"):
        sim.run(lambda: get_world("sim").run(all_reduce, world_size=2), world_size=1)
