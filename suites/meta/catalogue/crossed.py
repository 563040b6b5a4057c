"""Ranks that all communicate and wait for one another."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.errors import Deadlock

from .entry import fault

BUFFERED = {"under": {"buffered": None}, "why": "a buffered send ends without its receive"}


def neighbours():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return (rank - 1) % world_size, (rank + 1) % world_size


@fault(Deadlock, world_size=3, fields={"cycle": [0, 1, 2]}, source="NCCL #479, #783; pytorch #108378", **BUFFERED)
def ring_sends_before_it_receives(right):
    """Each rank of a ring sends to the next before it receives from the one before."""
    before, after = neighbours()
    x, y = torch.full((3,), float(dist.get_rank())), torch.zeros(3)
    if right:
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)])
        for work in works:
            work.wait()
    else:
        dist.send(x, after)  # blocks
        dist.recv(y, before)
    return y.tolist()


@fault(Deadlock, fields={"cycle": [0, 1]})
def both_receive_first(right):
    """Two neighbours receive each other's halo before they send their own."""
    mine, theirs = torch.full((2,), float(dist.get_rank())), torch.zeros(2)
    peer = 1 - dist.get_rank()
    if right and dist.get_rank() == 0:
        dist.send(mine, peer)
        dist.recv(theirs, peer)
    else:
        dist.recv(theirs, peer)  # blocks
        dist.send(mine, peer)
    return theirs.tolist()


@fault(Deadlock, fields={"cycle": [0, 1]})
def waits_for_the_receive_before_it_sends(right):
    """The receive is asynchronous, but it is waited for before the send is posted."""
    mine, theirs = torch.full((2,), float(dist.get_rank())), torch.zeros(2)
    peer = 1 - dist.get_rank()
    if right:
        ops = [dist.P2POp(dist.irecv, theirs, peer), dist.P2POp(dist.isend, mine, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    else:
        dist.irecv(theirs, peer).wait()  # blocks
        dist.isend(mine, peer).wait()
    return theirs.tolist()


@fault(Deadlock, fields={"cycle": [0, 1]}, **BUFFERED)
def one_f_one_b_with_blocking_messages(right):
    """In the steady state one stage sends activations forward while the next one sends gradients back."""
    stage, shape = dist.get_rank(), (2, 2)
    activation, gradient = torch.ones(shape), torch.full(shape, 0.5)
    incoming = torch.zeros(shape)
    if stage == 0:
        dist.send(activation, 1)  # warm-up
    else:
        dist.recv(incoming, 0)
    if right:
        out = gradient if stage else activation
        ops = [dist.P2POp(dist.isend, out, 1 - stage), dist.P2POp(dist.irecv, incoming, 1 - stage)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    elif stage == 0:
        dist.send(activation, 1)  # blocks
        dist.recv(incoming, 1)
    else:
        dist.send(gradient, 0)  # blocks
        dist.recv(incoming, 0)
    return incoming.tolist()


@fault(Deadlock, fields={"cycle": [0, 1]})
def two_groups_in_crossed_order(right):
    """Two groups of the same ranks: one rank reduces over the first and then the second, the other crosswise."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    x, y = torch.ones(1), torch.full((1,), 2.0)
    calls = [(x, first), (y, second)]
    for tensor, group in calls if right or dist.get_rank() == 0 else calls[::-1]:
        dist.all_reduce(tensor, group=group)  # blocks
    return [x.item(), y.item()]


@fault(Deadlock, world_size=4, fields={"cycle": [0, 1, 3, 2]})
def rows_and_columns_of_a_mesh(right):
    """On a 2 x 2 mesh, half of the ranks reduce over their row first, the others over their column."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    row, column = rows[rank // 2], columns[rank % 2]
    x = torch.tensor([rank + 1.0])
    for group in (row, column) if right or rank in (0, 3) else (column, row):
        dist.all_reduce(x, group=group)  # blocks
    return x.item()


@fault(Deadlock, fields={"cycle": [0, 1]}, **BUFFERED)
def barrier_against_a_message(right):
    """The receiver meets the others in a barrier first, the sender sends first."""
    x = torch.full((2,), float(dist.get_rank()))
    if dist.get_rank() == 0:
        if not right:
            dist.barrier()  # blocks
        dist.recv(x, 1)
        if right:
            dist.barrier()
    else:
        dist.send(x, 0)  # blocks
        dist.barrier()
    return x.tolist()


@fault(Deadlock, world_size=3, **BUFFERED)
def parameter_server_answers_in_rank_order(right):
    """The server takes the workers in the order of their ranks; a worker sends to its neighbour in between."""
    rank, x = dist.get_rank(), torch.zeros(1)
    if rank == 0:
        for worker in (1, 2):
            dist.recv(x, worker)  # blocks
    elif rank == 1:
        if right:
            dist.send(torch.ones(1), 0)
        dist.send(torch.ones(1), 2)  # blocks
        if not right:
            dist.send(torch.ones(1), 0)
    else:
        if right:
            dist.recv(x, 1)
        dist.send(torch.ones(1), 0)  # blocks
        if not right:
            dist.recv(x, 1)
    return x.item()


class Stage(nn.Module):
    """One layer of a pipeline that sends what it computes."""

    def __init__(self, before, after):
        super().__init__()
        self.layer, self.before, self.after = nn.Linear(2, 2), before, after


@fault(Deadlock, world_size=3)
def pipeline_that_closes_into_a_ring(right):
    """Each stage waits for the stage before; the first one must not, but its number is taken modulo the stages."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    before = (rank - 1) % 3 if not right else rank - 1
    stage = Stage(before, rank + 1)
    x = torch.ones(1, 2)
    if stage.before >= 0:
        dist.recv(x, stage.before)  # blocks
    x = stage.layer(x).detach()
    if stage.after < 3:
        dist.send(x, stage.after)
    return x.tolist()
