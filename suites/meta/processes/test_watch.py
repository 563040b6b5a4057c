"""Watched processes: an abort, a hang or a silent error on gloo becomes an exception about all ranks."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import CollectiveMismatch, Deadlock, RankDied, RankTimeout
from pdlcheck.worlds import get_world
from pdlcheck.worlds.processes import ProcessWorld
from pdlcheck.worlds.processes.controller import forkserver

LINE = os.path.basename(__file__)
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessWorld]:
    forkserver.start(preload=["pytest"])
    world = ProcessWorld(timeout_s=20)
    yield world
    world.close()


@pytest.mark.slow
def test_a_shape_mismatch_is_reported_and_the_next_call_works(processes):
    with pytest.raises(CollectiveMismatch, match="differ in the shape") as caught:
        processes.run(lambda: dist.all_reduce(torch.ones(2 + dist.get_rank())), world_size=2)
    assert [line[:7] for line in caught.value.ranks] == ["rank 0:", "rank 1:"]
    assert LINE in caught.value.ranks[1]
    assert processes.run(dist.get_rank, world_size=2) == [0, 1]


def test_processes_outlive_failures_that_leave_nothing_half_done(processes):
    def leave():
        if dist.get_rank() == 1:
            raise ValueError("no data")
        dist.all_reduce(torch.ones(1))

    pids = processes.pids(2)
    for _ in range(20):  # in some of these runs the other rank has not begun yet
        with pytest.raises(ValueError, match="no data"):
            processes.run(leave, world_size=2)
    with pytest.raises(CollectiveMismatch):
        processes.run(lambda: dist.all_reduce(torch.ones(2 + dist.get_rank())), world_size=2)
    with pytest.raises(Deadlock):
        processes.run(lambda: dist.send(torch.ones(1), dst=1 - dist.get_rank()), world_size=2)
    assert processes.run(every_call, world_size=2)[1]["new_group"]
    assert processes.pids(2) == pids


def threads_left_by_a_step(kept: list[threading.Thread] | None = None) -> list[str]:
    """Return the names of the threads that a step of DDP adds; with ``kept``, the step starts one itself."""
    before = set(threading.enumerate())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    if kept is not None:
        kept.append(threading.Thread(target=time.sleep, args=(1,), name="of the step", daemon=True))
        kept[0].start()
    return [thread.name for thread in threading.enumerate() if thread not in before]


def test_a_step_starts_no_thread_of_ours_beside_those_that_it_starts_itself():
    forkserver.start(preload=["pytest"])
    fresh = ProcessWorld(timeout_s=20)
    try:
        assert fresh.run(threads_left_by_a_step, world_size=2) == [[], []]
        assert fresh.run(lambda: threads_left_by_a_step([]), world_size=2) == [["of the step"]] * 2
    finally:
        fresh.close()


def test_a_reduce_op_mismatch_is_reported(processes):
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX]
    with pytest.raises(CollectiveMismatch, match=r"differ in the reduce-op: (SUM and MAX|MAX and SUM)"):
        processes.run(lambda: dist.all_reduce(torch.ones(2), op=ops[dist.get_rank()]), world_size=2)


def test_collectives_in_different_order_are_reported(processes):
    def body():
        calls = [lambda: dist.all_reduce(torch.ones(2)), lambda: dist.broadcast(torch.ones(2), src=0)]
        for call in calls if dist.get_rank() == 0 else reversed(calls):
            call()

    with pytest.raises(CollectiveMismatch, match="differ in the operation"):
        processes.run(body, world_size=2)


def test_a_message_that_does_not_fit_its_buffer_is_reported(processes):
    def body():
        if dist.get_rank() == 0:
            dist.send(torch.ones(3), dst=1)
        else:
            dist.recv(torch.empty(4), src=0)

    with pytest.raises(CollectiveMismatch, match="differs in the number of elements: 3 sent, 4 expected"):
        processes.run(body, world_size=2)


def test_a_ring_that_sends_before_it_receives_is_a_deadlock_at_once(processes):
    def ring():
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.send(torch.ones(1), dst=(rank + 1) % size)
        dist.recv(torch.empty(1), src=(rank - 1) % size)

    processes.run(dist.get_rank, world_size=3)
    start = time.monotonic()
    with pytest.raises(Deadlock, match="wait cycle: rank 0 -> rank 1 -> rank 2 -> rank 0") as caught:
        processes.run(ring, world_size=3)
    assert time.monotonic() - start < processes.timeout_s / 2
    assert len(caught.value.ranks) == 3
    assert all("blocked in send to rank" in line and LINE in line for line in caught.value.ranks)


def test_a_rank_that_takes_too_long_and_one_that_has_ended_are_shown_with_their_last_operation():
    def slow() -> None:
        dist.all_reduce(torch.ones(2))
        if dist.get_rank() == 1:
            time.sleep(60)
        if dist.get_rank() == 2:
            dist.barrier()

    world = ProcessWorld(timeout_s=0.5)
    try:
        with pytest.raises(RankTimeout) as caught:
            world.run(slow, world_size=3)
        done, busy, waiting = caught.value.ranks
        last = r"last operation all_reduce\(SUM\) of float32 \(2,\), .* collective 0, at .*test_watch.py:\d+"
        assert re.fullmatch(rf"rank 0: has returned; {last}", done)
        assert re.fullmatch(rf"rank 1: busy at .*test_watch.py:\d+; {last}", busy)
        assert re.fullmatch(r"rank 2: busy in barrier, .*, collective 1, at .*test_watch.py:\d+", waiting)
    finally:
        world.close()


def test_waiting_for_a_rank_that_has_returned_is_a_deadlock(processes):
    with pytest.raises(Deadlock, match="rank 1: has returned"):
        processes.run(lambda: dist.get_rank() == 1 or dist.barrier(), world_size=2)


def test_a_group_that_only_some_of_its_ranks_make_is_a_deadlock(processes):
    with pytest.raises(Deadlock, match=r"rank 0: blocked in new_group\(0, 1\), .*; waits for rank 1"):
        processes.run(lambda: dist.get_rank() == 1 or dist.new_group([0, 1]), world_size=2)


def total_in_groups(*groups):
    """Return the sum of the ranks in this rank's group; groups are made in the given order."""
    made = {ranks: dist.new_group(list(ranks)) for ranks in groups}
    mine = next(ranks for ranks in made if dist.get_rank() in ranks)
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total, group=made[mine])
    return total.item()


def test_groups_that_ranks_make_in_another_order_are_a_mismatch(processes):
    """The backend gloo numbers groups on each rank, so it would connect ranks of two groups."""

    def each_its_own_first():
        mine = dist.get_rank() % 2
        return total_in_groups((mine, mine + 2), (1 - mine, 3 - mine))

    for _ in range(3):
        with pytest.raises(CollectiveMismatch, match="make different groups: new_group") as caught:
            processes.run(each_its_own_first, world_size=4)
        assert all(f"{LINE}" in line for line in caught.value.ranks)
    assert processes.run(total_in_groups, (0, 2), (1, 3), world_size=4) == [2, 4, 2, 4]


def test_groups_that_their_members_alone_make_are_a_mismatch(processes):
    def each_its_own():
        mine = dist.get_rank() % 2
        return total_in_groups((mine, mine + 2))

    def each_its_own_and_says_so():
        mine = dist.get_rank() % 2
        group = dist.new_group([mine, mine + 2], use_local_synchronization=True)
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total, group=group)
        return total.item()

    with pytest.raises(CollectiveMismatch, match="also those that are not in a group"):
        processes.run(each_its_own, world_size=4)
    assert processes.run(each_its_own_and_says_so, world_size=4) == [2, 4, 2, 4]


def test_a_rank_that_dies_is_told_with_its_last_operation(processes):
    def body():
        dist.all_reduce(torch.ones(5))
        if dist.get_rank() == 1:
            os._exit(3)
        dist.barrier()

    with pytest.raises(RankDied, match=r"last operation  all_reduce\(SUM\) of float32 \(5,\)"):
        processes.run(body, world_size=2)


def test_a_forgotten_receive_does_not_disturb_the_next_call(processes):
    def forget():
        if dist.get_rank() == 0:
            dist.irecv(torch.empty(1), src=1)

    processes.run(forget, world_size=2)

    def total():
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    assert processes.run(total, world_size=2) == [2, 2]


def every_call():
    """Return the results of all c10d calls that gloo has."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(4.0) + 10 * rank
    found = {}

    def keep(name, *tensors):
        found[name] = [t.clone() for t in tensors]

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        y = x.clone()
        dist.all_reduce(y, op=op)
        keep(f"all_reduce {op}", y)
    y = x.clone()
    dist.broadcast(y, src=1)
    keep("broadcast", y)
    y = x.clone()
    dist.reduce(y, dst=1)
    if rank == 1:
        keep("reduce", y)
    ys = [torch.empty(4) for _ in range(size)]
    dist.all_gather(ys, x)
    keep("all_gather", *ys)
    y = torch.empty(4 * size)
    dist.all_gather_into_tensor(y, x)
    keep("all_gather_into_tensor", y)
    ys = [torch.empty(4) for _ in range(size)]
    dist.gather(x, ys if rank == 0 else None, dst=0)
    if rank == 0:
        keep("gather", *ys)
    y = torch.empty(4)
    dist.scatter(y, [x + i for i in range(size)] if rank == 1 else None, src=1)
    keep("scatter", y)
    y = torch.empty(2)
    dist.reduce_scatter_tensor(y, torch.arange(2.0 * size) + rank)
    keep("reduce_scatter_tensor", y)
    y = torch.empty(2 * size)
    dist.all_to_all_single(y, torch.arange(2.0 * size) + 10 * rank)
    keep("all_to_all_single", y)
    left, right = (rank - 1) % size, (rank + 1) % size
    y = torch.empty(4)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)])
    for work in works:
        work.wait()
    keep("batch_isend_irecv", y)
    if rank == 0:
        source = dist.recv(y, src=None, tag=3)
        keep("recv from any", y, torch.tensor(source))
    elif rank == 1:
        dist.send(x, dst=0, tag=3)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    found["objects"] = objects
    dist.barrier()
    dist.monitored_barrier()
    work = dist.all_reduce(y := x.clone(), async_op=True)
    found["future"] = work.get_future().then(lambda future: future.value()[0].sum().item()).wait()
    work.wait()
    keep("async", y)
    group = dist.new_group([1, 0])
    if rank < 2:
        dist.broadcast(y, src=0, group=group)
        if rank == 1:
            dist.send(y, dst=0, group=group)
        else:
            keep("recv from any in a group", y, torch.tensor(dist.recv(y, group=group)))
    keep("new_group", y)
    return found


def test_every_call_gives_what_plain_gloo_gives(processes):
    plain = ProcessWorld(timeout_s=20, watch=False)
    try:
        expected = plain.run(every_call, world_size=3)
    finally:
        plain.close()
    found = processes.run(every_call, world_size=3)
    for rank in range(3):
        assert found[rank].keys() == expected[rank].keys()
        for name, values in expected[rank].items():
            assert str(found[rank][name]) == str(values), (rank, name)


def one_after_the_other():
    """Start a second operation in the callback of one that needed a grant, because rank 1 is late."""

    def again(future):
        y = future.value()[0].clone()
        dist.all_reduce(y)
        return y

    for _ in range(100):
        time.sleep(0.004 * dist.get_rank())
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(again)
        time.sleep(0.006 * (1 - dist.get_rank()))
        assert future.wait().item() == 4.0


def test_callbacks_that_communicate_leave_the_control_thread_to_its_messages(processes):
    processes.run(one_after_the_other, world_size=2)


def test_a_rank_may_simulate_ranks_of_its_own_at_another_time_than_the_others(processes):
    def simulate(world_size):
        time.sleep(0.3 * dist.get_rank())
        return get_world("sim").run(dist.get_world_size, world_size=world_size)

    assert processes.run(simulate, 3, world_size=2) == [[3] * 3] * 2


def test_an_unwatched_world_leaves_the_mismatch_to_gloo():
    world = ProcessWorld(timeout_s=5, watch=False)
    try:
        ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX]
        silent = world.run(lambda: dist.all_reduce(torch.ones(2), op=ops[dist.get_rank()]), world_size=2)
        assert silent == [None, None]
    finally:
        world.close()


def test_lists_of_the_wrong_length_are_refused_before_the_controller_compares_them(processes):
    """A late rank makes the others ask the controller."""

    def exchange(late):
        if dist.get_rank() == late:
            time.sleep(0.1)
        short = [torch.zeros(1) for _ in range(2)]
        with pytest.raises(RuntimeError, match="all_to_all needs 3 inputs, one for each rank of the group, got 2"):
            dist.all_to_all(short, [torch.zeros(1) for _ in range(2)])
        return "refused"

    assert processes.run(exchange, 2, world_size=3) == ["refused"] * 3
