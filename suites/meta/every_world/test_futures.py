"""Ways to wait for futures other than their own ``wait``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import Deadlock

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
