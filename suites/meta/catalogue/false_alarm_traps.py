"""Programs that look faulty and are not: no verdict on any of them, in any profile, under any schedule.

The results of every rank stand beside each program. Numbers in docstrings are those of the trap list of real bugs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .hazards import peer

# -- buffers --------------------------------------------------------------------------------------


def reads_what_it_sends():
    x = torch.ones(3)
    work = dist.isend(x, peer()) if dist.get_rank() == 0 else dist.irecv(torch.zeros(3), 0)
    total = x.sum().item() + len(x.tolist())
    work.wait()
    return total


def root_reads_what_it_broadcasts():
    x = torch.ones(3)
    work = dist.broadcast(x, 0, async_op=True)
    total = x.sum().item() if dist.get_rank() == 0 else 3.0
    work.wait()
    return total


def works_on_other_rows():
    buffer = torch.zeros(4, 3)
    work = dist.all_reduce(buffer[:2], async_op=True)
    buffer[2:] += 1
    total = buffer[2:].sum().item()
    work.wait()
    return total


def works_on_other_columns():
    buffer = torch.zeros(3, 4).t()  # so that a column is one block of memory
    work = dist.all_reduce(buffer[:, 1], async_op=True)
    buffer[:, 0] += 1
    buffer[:, 2] += 1
    total = (buffer[:, 0] + buffer[:, 2]).sum().item()
    work.wait()
    return total


def looks_at_shapes_alone():
    x = torch.ones(2, 3)
    work = dist.all_reduce(x, async_op=True)
    views = x.view(-1), x[0], x.t(), x.detach()
    others = torch.empty_like(x), torch.zeros_like(x), x.new_ones(3)
    sizes = x.shape, x.dtype, x.numel(), x.is_contiguous()
    work.wait()
    return len(views) + len(others) + len(sizes)


def asks_until_it_is_complete():
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    return x.tolist()


def waits_for_the_future():
    x = torch.ones(2)
    dist.all_reduce(x, async_op=True).get_future().wait()
    return x.tolist()


def continues_in_a_callback():
    x = torch.ones(2)
    future = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    return future.wait().tolist()


def waits_in_another_order():
    tensors = [torch.ones(2) for _ in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    return sum(tensor.sum().item() for tensor in tensors)


def waits_twice():
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    x += 1
    work.wait()
    return x.tolist()


def overlaps_two_buffers():
    buffers = [torch.full((2,), float(i)) for i in range(2)]
    works: list[dist.Work | None] = [None, None]
    for i in range(6):
        if works[i % 2] is not None:
            works[i % 2].wait()
        buffers[i % 2] += 1
        works[i % 2] = dist.all_reduce(buffers[i % 2], async_op=True)
    for work in works:
        work.wait()
    return [buffer.tolist() for buffer in buffers]


# -- control flow and order -------------------------------------------------------------------------


def rank_0_logs_and_saves():
    """Trap 14: rank 0 works without collectives."""
    x = torch.ones(1)
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        log = [x.item() for _ in range(3)]
        assert len(log) == 3
    dist.barrier()
    return x.item()


def ranks_take_part_in_unequal_numbers_of_collectives():
    """Trap 14, pytorch #148976: a sub-group works on its own between two barriers."""
    alone = dist.new_group([0])
    x = torch.ones(1)
    if dist.get_rank() == 0:
        for _ in range(3):
            dist.all_reduce(x, group=alone)
    dist.barrier()
    return x.item()


def one_collective_reached_from_two_branches():
    """Contribute zeros from another line on a rank without data."""
    if dist.get_rank() == 0:
        total = torch.ones(2)
        dist.all_reduce(total)
    else:
        nothing = torch.zeros(2)
        dist.all_reduce(nothing)
        total = nothing
    return total.tolist()


def messages_posted_in_compatible_order():
    """Trap 16: one rank posts its receive first, the other its send."""
    mine, theirs = torch.full((2,), 3.0), torch.zeros(2)
    posts = [lambda: dist.isend(mine, peer()), lambda: dist.irecv(theirs, peer())]
    works = [post() for post in (posts if dist.get_rank() else posts[::-1])]
    for work in works:
        work.wait()
    return theirs.tolist()


def double_buffered_exchange():
    """Trap 16: sent and received buffers exchange their roles correctly at every step."""
    buffers = [torch.ones(2), torch.zeros(2)]
    for step in range(4):
        out, into = buffers[step % 2], buffers[(step + 1) % 2]
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, out, peer()), dist.P2POp(dist.irecv, into, peer())])
        for work in works:
            work.wait()
    return buffers[0].tolist()


def equal_messages_kept_apart_by_position():
    """Trap 16: two equal messages are received in the order in which they were sent."""
    got = [torch.zeros(1), torch.zeros(1)]
    ops = [dist.P2POp(dist.isend, torch.full((1,), float(i)), peer(), tag=i) for i in range(2)]
    ops += [dist.P2POp(dist.irecv, x, peer(), tag=i) for i, x in enumerate(got)]
    works = dist.batch_isend_irecv(ops)
    if dist.get_rank():
        works.reverse()
    for work in works:
        work.wait()
    return [x.item() for x in got]


# -- replicas that differ by design ---------------------------------------------------------------


def accumulates_without_synchronising():
    """Trap 5: inside no_sync local gradients differ."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    with model.no_sync():
        model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    model(torch.ones(1, 1)).sum().backward()
    return model.module.weight.grad.item()


def averages_every_second_step():
    """Trap 4: between averaging points the replicas of local SGD differ."""
    weight = torch.zeros(1)
    for step in range(4):
        weight += dist.get_rank() + 1
        if step % 2:
            dist.all_reduce(weight)
            weight /= 2
    return weight.item()


def batch_norm_with_statistics_of_its_own():
    """Trap 2: running statistics differ by rank, buffers are not broadcast."""
    model = DistributedDataParallel(nn.BatchNorm1d(1), broadcast_buffers=False)
    for _ in range(2):
        model(torch.arange(4.0).view(4, 1) * (dist.get_rank() + 1)).sum().backward()
    return model.module.weight.grad.shape == (1,)


def batch_norm_with_broadcast_buffers():
    """Trap 2: rank 0's statistics arrive at the next forward."""
    model = DistributedDataParallel(nn.BatchNorm1d(1))
    for _ in range(2):
        model(torch.arange(4.0).view(4, 1) * (dist.get_rank() + 1)).sum().backward()
    return model.module.weight.grad.shape == (1,)


def seeds_differ_before_the_wrap():
    """Trap 9: DDP broadcasts rank 0's weights at construction."""
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(2, 2))
    weights = [torch.zeros(2, 2) for _ in range(2)]
    dist.all_gather(weights, model.module.weight.detach())
    return torch.equal(*weights)


def shards_differ_by_rank():
    """Trap 17: each rank holds another part, and gathers parts of equal shape."""
    mine = torch.arange(4.0).chunk(2)[dist.get_rank()].clone()
    mine *= 2
    out = torch.zeros(4)
    dist.all_gather_into_tensor(out, mine)
    return out.tolist()


def unequal_inputs_with_join():
    """Train with unequal numbers of batches on the ranks, and DDP's join."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1))
    with model.join():
        for _ in range(1 + dist.get_rank()):
            model(torch.ones(1, 1)).sum().backward()
    return True


def unused_parameter_that_is_announced():
    """Trap 13: a parameter has no gradient on one rank."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])

    class Switch(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return self.layers[dist.get_rank()](x)

    model = DistributedDataParallel(Switch(), find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
    return [layer.weight.grad.item() for layer in layers]


INNOCENT = [
    (reads_what_it_sends, 6.0),
    (root_reads_what_it_broadcasts, 3.0),
    (works_on_other_rows, 6.0),
    (works_on_other_columns, 8.0),
    (looks_at_shapes_alone, 11),
    (asks_until_it_is_complete, [2.0, 2.0]),
    (waits_for_the_future, [2.0, 2.0]),
    (continues_in_a_callback, [4.0, 4.0]),
    (waits_in_another_order, 16.0),
    (waits_twice, [3.0, 3.0]),
    (overlaps_two_buffers, [[14.0, 14.0], [22.0, 22.0]]),
    (rank_0_logs_and_saves, 2.0),
    (ranks_take_part_in_unequal_numbers_of_collectives, 1.0),
    (one_collective_reached_from_two_branches, [1.0, 1.0]),
    (messages_posted_in_compatible_order, [3.0, 3.0]),
    (double_buffered_exchange, [1.0, 1.0]),
    (equal_messages_kept_apart_by_position, [0.0, 1.0]),
    (accumulates_without_synchronising, 2.5),
    (averages_every_second_step, 6.0),
    (batch_norm_with_statistics_of_its_own, True),
    (batch_norm_with_broadcast_buffers, True),
    (seeds_differ_before_the_wrap, True),
    (shards_differ_by_rank, [0.0, 2.0, 4.0, 6.0]),
    (unequal_inputs_with_join, True),
    (unused_parameter_that_is_announced, [0.5, 0.5]),
]
