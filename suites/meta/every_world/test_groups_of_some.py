"""A program may leave the default group and make one of some ranks, or of all in another order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import Deadlock
from pdlcheck.worlds import get_world


def anew(name, place, size):
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=place, world_size=size)


def total(value, group=None):
    x = torch.tensor([float(value)])
    dist.all_reduce(x, group=group)
    return x.item()


def halves():
    """Communicate in both halves, which number their groups, collectives and messages alike."""
    rank = dist.get_rank()
    anew(f"half {rank // 2}", rank % 2, 2)
    pair = dist.new_group([1, 0])
    told = [dist.get_rank(), dist.get_world_size(), total(rank), total(rank, pair)]
    message = torch.tensor([float(rank)])
    if dist.get_rank():
        dist.send(message, 0)
    else:
        dist.recv(message, 1)
    everyone = [None] * 2
    dist.all_gather_object(everyone, rank)
    dist.broadcast(message, 1)
    return [*told, message.item(), everyone]


def in_another_order():
    rank = dist.get_rank()
    anew("reversed", 3 - rank, 4)
    gathered = [torch.zeros(1) for _ in range(4)]
    dist.all_gather(gathered, torch.tensor([float(rank)]))
    first = torch.tensor([float(rank)])
    dist.broadcast(first, 0)
    odd = dist.new_group([1, 3])
    return [dist.get_rank(), [x.item() for x in gathered], first.item(), dist.get_rank(odd)]


def each_alone():
    rank = dist.get_rank()
    anew(f"rank {rank}", 0, 1)
    return [dist.get_rank(), dist.get_world_size(), total(rank)]


def of_some():
    rank = dist.get_rank()
    if rank == 0:
        dist.barrier()
        dist.destroy_process_group()
        return None
    anew("the others", rank - 1, 3)
    return [dist.get_rank(), total(rank), total(rank, dist.new_group([0, 1, 2]))]


def halves_of_different_minds():
    """Reduce in one half; broadcast and enter a barrier in the other."""
    rank = dist.get_rank()
    anew(f"half {rank // 2}", rank % 2, 2)
    x = torch.full((2,), float(rank))
    for _ in range(3):
        if rank < 2:
            dist.all_reduce(x)
        else:
            dist.broadcast(x, 0)
            dist.barrier()
    return x.tolist()


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (halves, [[0, 2, 1, 1, 1, [0, 1]], [1, 2, 1, 1, 1, [0, 1]], [0, 2, 5, 5, 3, [2, 3]], [1, 2, 5, 5, 3, [2, 3]]]),
        (in_another_order, [[3 - rank, [3, 2, 1, 0], 3, [1, -1, 0, -1][rank]] for rank in range(4)]),
        (each_alone, [[0, 1, rank] for rank in range(4)]),
        (halves_of_different_minds, [[4, 4], [4, 4], [2, 2], [2, 2]]),
        (of_some, [None, [0, 6, 6], [1, 6, 6], [2, 6, 6]]),
    ],
)
def test_a_new_default_group(world, program, expected):
    assert world.run(program, world_size=4) == expected
    assert world.run(dist.get_rank, world_size=4) == [0, 1, 2, 3]


def one_half_waits_for_ever():
    rank = dist.get_rank()
    anew(f"half {rank // 2}", rank % 2, 2)
    if rank != 2:
        total(rank)


def test_who_waits_for_whom_is_told_in_numbers_of_the_cluster():
    with pytest.raises(Deadlock) as raised:
        get_world("sim").run(one_half_waits_for_ever, world_size=4)
    assert "rank 3: blocked in all_reduce(SUM) of float32 (1,), default group (ranks 2, 3)" in str(raised.value)
    with pytest.raises(Deadlock, match="rank 3: blocked in all_reduce") as raised:
        get_world("gloo").run(one_half_waits_for_ever, world_size=4)
    assert "(ranks 2, 3)" in str(raised.value)
