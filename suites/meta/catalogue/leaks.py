"""Programs that leave work behind; each is right when called with ``right=True``.

The mark ``# leaks`` names the line that a verdict must give.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .hazard_programs import peer


def handle_is_dropped(right):
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)  # leaks
    if right:
        work.wait()


def sent_and_forgotten(right):
    x = torch.ones(2)
    if dist.get_rank() == 1:
        return dist.recv(x, 0)
    work = dist.isend(x, 1)  # leaks
    return work.wait() if right else None


def received_and_forgotten(right):
    x = torch.ones(2)
    if dist.get_rank() == 0:
        return dist.send(x, 1)
    work = dist.irecv(x, 0)  # leaks
    return work.wait() if right else None


def only_the_last_is_waited_for(right):
    tensors = [torch.ones(2) for _ in range(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]  # leaks
    for work in works if right else works[-1:]:
        work.wait()


def only_receives_are_waited_for(right):
    x, y = torch.ones(2), torch.zeros(2)
    ops = [dist.P2POp(dist.isend, x, peer()), dist.P2POp(dist.irecv, y, peer())]
    sending, receiving = dist.batch_isend_irecv(ops)  # leaks
    receiving.wait()
    if right:
        sending.wait()


def coalesced_and_forgotten(right):
    a, b = torch.ones(2), torch.ones(3)
    with dist._coalescing_manager(async_ops=True) as manager:  # leaks
        dist.all_reduce(a)
        dist.all_reduce(b)
    if right:
        manager.wait()


def only_rank_0_waits(right):
    work = dist.barrier(async_op=True)  # leaks
    if right or dist.get_rank() == 0:
        work.wait()


def barrier_in_the_place_of_a_wait(right):
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)  # leaks
    dist.barrier()
    if right:
        work.wait()


def partner_never_comes(right):
    work = dist.irecv(torch.zeros(2), peer()) if dist.get_rank() == 1 else None  # leaks
    if right:
        if work is None:
            dist.send(torch.ones(2), 1)
        else:
            work.wait()


def overlapped_over_the_end_of_the_loop(right):
    pending = None
    for _ in range(3):
        if pending is not None:
            pending.wait()
        pending = dist.all_reduce(torch.ones(2), async_op=True)  # leaks
    if right:
        pending.wait()


LEAKS = [
    handle_is_dropped,
    sent_and_forgotten,
    received_and_forgotten,
    only_the_last_is_waited_for,
    only_receives_are_waited_for,
    coalesced_and_forgotten,
    only_rank_0_waits,
    barrier_in_the_place_of_a_wait,
    partner_never_comes,
    overlapped_over_the_end_of_the_loop,
]


def never_received():
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), 1)
