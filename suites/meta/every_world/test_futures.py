"""Ways to wait for futures other than their own ``wait``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import Deadlock
from pdlcheck.worlds import get_world

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.wait. is deprecated:DeprecationWarning")


def reduced():
    return dist.all_reduce(torch.ones(1), async_op=True).get_future()


def by_jit():
    return torch.jit.wait(reduced())[0].item()


def what_a_callback_returns_by_jit():
    return torch.jit.wait(reduced().then(lambda done: done.value()[0])).item()


def several_by_jit():
    return _of_several(torch.jit.wait(torch.futures.collect_all([reduced(), reduced()])))


def several_collected():
    return _of_several(torch.futures.collect_all([reduced(), reduced()]).wait())


def several_in_the_other_order():
    return _of_several(torch.futures.collect_all([reduced(), reduced()][::-1]).wait())


def all_of_several():
    first, second = torch.futures.wait_all([reduced(), reduced()])
    return first[0].item() if torch.equal(first[0], second[0]) else None


def _of_several(futures):
    first, second = (future.value()[0].item() for future in futures)
    return first if first == second else None


ALL = [
    by_jit,
    what_a_callback_returns_by_jit,
    several_by_jit,
    several_collected,
    several_in_the_other_order,
    all_of_several,
]


@pytest.mark.parametrize("program", ALL, ids=lambda program: program.__name__)
def test_a_future_is_waited_for(world, program):
    assert world.run(program, world_size=3) == [3.0] * 3


def of_messages():
    peer, seen = 1 - dist.get_rank(), torch.zeros(1)
    pair = [dist.P2POp(dist.isend, torch.ones(1), peer), dist.P2POp(dist.irecv, seen, peer)]
    works = dist.batch_isend_irecv(pair)
    try:
        for work in works:
            work.get_future().wait()
        return seen.item()
    finally:
        for work in works:
            work.wait()


def of_a_reduce_scatter():
    part = torch.zeros(1)
    work = dist.reduce_scatter(part, [torch.ones(1), torch.ones(1)], async_op=True)
    try:
        return work.get_future().then(lambda done: done.value()[0].item() - 1).wait()
    finally:
        work.wait()


@pytest.mark.parametrize(("program", "op"), [(of_messages, "send"), (of_a_reduce_scatter, "reduce_scatter")])
def test_what_has_none_on_gloo_is_to_be_waited_for(world, program, op):
    with pytest.raises(RuntimeError, match=rf"getFuture not implemented: gloo has no future of a {op}; call wait\(\)"):
        world.run(program, world_size=2)
    assert get_world("sim", semantics="nccl").run(program, world_size=2) == [1.0, 1.0]


@pytest.mark.parametrize("program", [of_messages, of_a_reduce_scatter])
def test_a_group_of_gloo_that_nobody_watches_has_no_such_future_either(program):
    world = get_world("gloo", watch=False)
    with world.open(2) as ranks, pytest.raises(RuntimeError, match="getFuture not implemented"):
        ranks.run(program)
    world.close()


def alone():
    if dist.get_rank() == 0:
        by_jit()


def test_a_wait_of_jit_is_part_of_a_deadlock(world):
    with pytest.raises(Deadlock, match=r"rank 0: blocked in .*\n  rank 1: has returned"):
        world.run(alone, world_size=2)


def by_jit_without_an_operation():
    task = torch.jit.fork(torch.add, torch.ones(1), 1)
    return torch.jit.wait(task).item()


@pytest.mark.filterwarnings("ignore:.torch.jit.fork. is deprecated:DeprecationWarning")
def test_tasks_of_jit_are_as_ever(world):
    assert by_jit_without_an_operation() == 2
    assert world.run(by_jit_without_an_operation, world_size=2) == [2, 2]
    with pytest.raises(TypeError, match="incompatible function arguments"):
        torch.jit.wait(1)
