"""Operations that no rank waited for when the ranks return."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pdlcheck.errors import LeakedWork

from .entry import fault
from .hazards import peer

STREAM = {"under": {"nccl": None}, "why": "on nccl a wait for a collective is one for those before it on its group"}


@fault(LeakedWork)
def handle_is_dropped(right):
    """The handle of an asynchronous reduction is dropped."""
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)  # leaks
    if right:
        work.wait()


@fault(LeakedWork)
def sent_and_forgotten(right):
    """A message is sent and never waited for."""
    x = torch.ones(2)
    if dist.get_rank() == 1:
        return dist.recv(x, 0)
    work = dist.isend(x, 1)  # leaks
    return work.wait() if right else None


@fault(LeakedWork)
def received_and_forgotten(right):
    """A message is received and never waited for."""
    x = torch.ones(2)
    if dist.get_rank() == 0:
        return dist.send(x, 1)
    work = dist.irecv(x, 0)  # leaks
    return work.wait() if right else None


@fault(LeakedWork, **STREAM)
def only_the_last_is_waited_for(right):
    """Of several works, only the last is waited for."""
    tensors = [torch.ones(2) for _ in range(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]  # leaks
    for work in works if right else works[-1:]:
        work.wait()


@fault(LeakedWork)
def only_receives_are_waited_for(right):
    """In a batch, the sends are not waited for."""
    x, y = torch.ones(2), torch.zeros(2)
    ops = [dist.P2POp(dist.isend, x, peer()), dist.P2POp(dist.irecv, y, peer())]
    sending, receiving = dist.batch_isend_irecv(ops)  # leaks
    receiving.wait()
    if right:
        sending.wait()


@fault(LeakedWork)
def coalesced_and_forgotten(right):
    """The manager of coalesced calls is not asked to wait."""
    a, b = torch.ones(2), torch.ones(3)
    with dist._coalescing_manager(async_ops=True) as manager:  # leaks
        dist.all_reduce(a)
        dist.all_reduce(b)
    if right:
        manager.wait()


@fault(LeakedWork)
def only_rank_0_waits(right):
    """An asynchronous barrier that one rank does not wait for."""
    work = dist.barrier(async_op=True)  # leaks
    if right or dist.get_rank() == 0:
        work.wait()


@fault(LeakedWork, **STREAM)
def barrier_in_the_place_of_a_wait(right):
    """A barrier is taken for a wait."""
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)  # leaks
    dist.barrier()
    if right:
        work.wait()


@fault(LeakedWork)
def partner_never_comes(right):
    """A receive is posted for which nobody sends, and nobody waits."""
    work = dist.irecv(torch.zeros(2), peer()) if dist.get_rank() == 1 else None  # leaks
    if right:
        if work is None:
            dist.send(torch.ones(2), 1)
        else:
            work.wait()


@fault(LeakedWork)
def overlapped_over_the_end_of_the_loop(right):
    """A loop waits for the work of the step before, and nobody for the last."""
    pending = None
    for _ in range(3):
        if pending is not None:
            pending.wait()
        pending = dist.all_reduce(torch.ones(2), async_op=True)  # leaks
    if right:
        pending.wait()
