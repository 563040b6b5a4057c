"""Messages: their destination, tag, shape and dtype."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pdlcheck.errors import CollectiveMismatch, Deadlock, LeakedWork, Livelock
from pdlcheck.worlds.semantics import PROFILES

from .entry import fault


@fault(Deadlock)
def never_sent(right):
    """A receive for which no rank sends."""
    x = torch.ones(2)
    if dist.get_rank() == 1:
        dist.recv(x, 0)  # blocks
    elif right:
        dist.send(x + 1, 1)
    return x.tolist()


@fault(
    Deadlock, under={"buffered": LeakedWork}, why="a buffered send ends, and its message is left behind",
)  # fmt: skip
def never_received(right):
    """A send that no rank receives."""
    x = torch.ones(2)
    if dist.get_rank() == 0:
        dist.send(x + 1, 1)  # blocks
    elif right:
        dist.recv(x, 0)
    return x.tolist()


@fault(Deadlock, under={"nccl": None}, why="on nccl a second wait returns")
def waits_again_for_a_message(right):
    """The clean-up after a loop waits for all messages, those too that the loop has waited for."""
    x = torch.ones(2)
    work = dist.irecv(x, 0) if dist.get_rank() else dist.isend(x + 1, 1)  # posts
    work.wait()
    if not right:
        work.wait()  # blocks
    return x.tolist()


POLLED = {"rendezvous": None, "buffered": None, "nccl": None}


@fault(Livelock, under=POLLED, why="only on gloo no message is complete before it is waited for")
def asks_for_a_message_before_it_waits(right):
    """A loop does other work until the message has arrived, and asks it whether it has."""
    x = torch.ones(2)
    work = dist.irecv(x, 0) if dist.get_rank() else dist.isend(x + 1, 1)  # posts
    while not (right or work.is_completed()):
        pass
    work.wait()
    return x.tolist()


TAGS_IGNORED = {"under": {"nccl": None}, "why": "nccl has no tags: the messages fit"}


@fault(Deadlock, **TAGS_IGNORED)
def waits_for_another_tag(right):
    """Sender and receiver count their micro-batches from 0 and from 1."""
    x = torch.ones(2)
    if dist.get_rank() == 0:
        dist.isend(x + 1, 1, tag=0).wait()  # blocks
    else:
        dist.recv(x, 0, tag=0 if right else 1)  # blocks
    return x.tolist()


@fault(Deadlock, world_size=3)
def receives_from_another_rank(right):
    """The receiver names a rank that sends to someone else."""
    x = torch.ones(1)
    if dist.get_rank() == 0:
        dist.send(x + 1, 2)  # blocks
    elif dist.get_rank() == 2:
        dist.recv(x, 0 if right else 1)  # blocks
    return x.item()


@fault(Deadlock, world_size=3)
def halo_at_the_edge(right):
    """The last rank of a line waits for a neighbour that is the first rank, which does not send."""
    rank = dist.get_rank()
    halo = torch.zeros(1)
    works = []
    if rank > 0:
        works.append(dist.isend(torch.full((1,), float(rank)), rank - 1))
    if rank < 2 or not right:
        works.append(dist.irecv(halo, (rank + 1) % 3))  # blocks
    for work in works:
        work.wait()
    return halo.item()


@fault(CollectiveMismatch, fields={"what": "the number of elements"})
def buffer_is_too_short(right):
    """The last micro-batch is smaller, and the receiver does not know."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1)  # differs
        return None
    x = torch.zeros(3 if right else 4)
    dist.recv(x, 0)  # differs
    return x.tolist()


@fault(CollectiveMismatch, fields={"what": "the dtype"})
def activations_in_another_dtype(right):
    """One stage runs under autocast and sends bfloat16, the next receives float32."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(4, dtype=torch.bfloat16), 1)  # differs
        return None
    x = torch.zeros(4, dtype=torch.bfloat16 if right else torch.float32)
    dist.recv(x, 0)  # differs
    return x.tolist()


@fault(CollectiveMismatch, fields={"what": "the number of elements"}, source="pytorch #63486")
def two_messages_in_another_order(right):
    """Two messages of unlike shape to one rank, received the other way round without tags."""
    a, b = torch.ones(2), torch.ones(3)
    if dist.get_rank() == 0:
        works = [dist.isend(a, 1), dist.isend(b, 1)]  # differs
    else:
        works = [dist.irecv(x, 0) for x in ((a, b) if right else (b, a))]  # differs
    for work in works:
        work.wait()
    return a.tolist(), b.tolist()


@fault(
    CollectiveMismatch, source="pytorch #63486, #49968", under=dict.fromkeys(PROFILES),
    why="not found: names of tensors are compared for collectives, not for messages",
)  # fmt: skip
def two_equal_messages_in_another_order(right):
    """As before, and the shapes are equal: nothing in the data tells that they are swapped."""
    keys, values = torch.zeros(2), torch.zeros(2)
    if dist.get_rank() == 0:
        keys += 1
        values += 2
        works = [dist.isend(keys, 1), dist.isend(values, 1)]  # differs
    elif right:
        works = [dist.irecv(keys, 0), dist.irecv(values, 0)]
    else:
        works = [dist.irecv(values, 0), dist.irecv(keys, 0)]  # differs
    for work in works:
        work.wait()
    return keys.tolist(), values.tolist()


@fault(Deadlock, under={"buffered": LeakedWork}, why="a buffered send ends, and its message is left behind")
def batch_without_its_receive(right):
    """Both ranks batch their sends; one of them forgets to receive."""
    peer = 1 - dist.get_rank()
    x, y = torch.full((2,), float(dist.get_rank())), torch.zeros(2)
    ops = [dist.P2POp(dist.isend, x, peer)]
    if right or dist.get_rank() == 0:
        ops.append(dist.P2POp(dist.irecv, y, peer))
    for work in dist.batch_isend_irecv(ops):  # blocks
        work.wait()
    return y.tolist()


@fault(CollectiveMismatch, fields={"what": "the number of elements"})
def object_list_of_another_length(right):
    """The receiver of a list of objects expects one more."""
    objects = ["config", 3] if dist.get_rank() == 0 else [None] * (2 if right else 3)
    if dist.get_rank() == 0:
        dist.send_object_list(objects, 1)  # differs
    else:
        dist.recv_object_list(objects, 0)  # differs
    return objects
