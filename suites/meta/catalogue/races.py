"""Faults that only some schedules show, ranks that poll for ever, and ranks that fail while others wait."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from pdlcheck.errors import CollectiveMismatch, Deadlock, Livelock, RankFailed, Unsupported

from .entry import fault

NO_ANY_SOURCE = {"under": {"nccl": Unsupported}, "why": "nccl has no receive from any rank"}


def default_store():
    return dist.distributed_c10d._get_default_store()


# -- the order of arrival -------------------------------------------------------------------------


@fault(Deadlock, world_size=3, schedules=20, **NO_ANY_SOURCE)
def takes_any_rank_and_then_a_certain_one(right):
    """Rank 0 takes the first result from whoever is ready, and the second from rank 2: it trusts that 1 was first."""
    x = torch.zeros(1)
    if dist.get_rank():
        dist.send(x + dist.get_rank(), 0)  # blocks
        return None
    first = dist.recv(x)
    total = x.item()
    dist.recv(x, 3 - first if right else 2)  # blocks
    return total + x.item()


@fault(CollectiveMismatch, world_size=3, schedules=20, fields={"what": "the number of elements"}, **NO_ANY_SOURCE)
def results_of_unlike_size_from_any_rank(right):
    """Rank 0 gives each buffer to whoever comes first, and the workers' results differ in length."""
    rank = dist.get_rank()
    if rank:
        dist.send(torch.ones(rank), 0, tag=rank if right else 0)  # differs
        return None
    buffers = [torch.zeros(1), torch.zeros(2)]
    for i, buffer in enumerate(buffers):
        dist.recv(buffer, tag=i + 1 if right else 0)  # differs
    return [buffer.tolist() for buffer in buffers]


@fault(CollectiveMismatch, schedules=20, fields={"what": "the root"})
def leader_is_checked_and_then_set(right):
    """Each rank looks whether there is a leader and becomes one if not; two of them may look at the same time."""
    store, rank = default_store(), dist.get_rank()
    if right:
        leader = int(store.compare_set("leader", "", str(rank)))
    elif store.check(["leader"]):
        leader = int(store.get("leader"))
    else:
        store.set("leader", str(rank))
        leader = rank
    x = torch.ones(1)
    dist.broadcast(x, src=leader)  # differs
    return x.item()


@fault(Deadlock, world_size=2, schedules=20)
def counter_is_read_and_then_written(right):
    """Arrivals are counted by get and set, so one of two may be lost; then nobody opens the gate."""
    store = default_store()
    if right:
        count = store.add("count", 1)
    else:
        count = (int(store.get("count")) if store.check(["count"]) else 0) + 1
        store.set("count", str(count))
    if count == 2:
        store.set("gate", "open")
    store.wait(["gate"])  # blocks


@fault(FileNotFoundError, schedules=20, source="d2go PR #621, D-FINE PR #221")
def reads_what_rank_0_is_still_to_write(right):
    """Rank 0 writes the weights, and the others load them at once."""
    with tempfile.TemporaryDirectory() as own:
        place = [own]
        dist.broadcast_object_list(place)
        path = Path(place[0]) / "weights.pt"
        if dist.get_rank() == 0:
            torch.save(torch.ones(3), path)
        if right:
            dist.barrier()
        weights = torch.load(path)  # raises
        dist.barrier()  # keeps the folder until all have read
    return weights.tolist()


# -- asking for ever ------------------------------------------------------------------------------

ASKED = {"gloo": Livelock}  # there no message is complete before the wait


@fault(Livelock, twin_under=ASKED)
def polls_a_message_that_nobody_sends(right):
    """A rank asks whether its receive is complete, and the sender has returned."""
    x = torch.zeros(1)
    if dist.get_rank() == 0:
        work = dist.irecv(x, 1)  # asks
        while not work.is_completed():
            pass
    elif right:
        dist.send(x + 1, 0)
    return x.item()


@fault(Livelock)
def polls_a_key_that_nobody_sets(right):
    """A rank asks the store for a flag that the other rank sets only if it has work."""
    store = default_store()
    if dist.get_rank() == 0:
        while not store.check(["done"]):  # asks
            pass
    elif right:
        store.set("done", "1")


@fault(Livelock, twin_under=ASKED)
def both_poll_and_neither_sends(right):
    """Two ranks that each answer a request, and both wait for one; right: rank 1 asks first."""
    peer, x = 1 - dist.get_rank(), torch.zeros(1)
    if right and dist.get_rank() == 1:
        dist.send(x + 1, peer)
        return x.item()
    request = dist.irecv(x, peer)  # asks
    while not request.is_completed():
        pass
    if not right:
        dist.send(x, peer)
    return x.item()


# -- failures -------------------------------------------------------------------------------------


@fault(ValueError, world_size=3, says="no data on rank 1")
def raises_while_the_others_wait(right):
    """A rank without data raises, and the others wait for it in a reduction."""
    x = torch.ones(1)
    if dist.get_rank() == 1 and not right:
        raise ValueError("no data on rank 1")  # raises
    dist.all_reduce(x)
    return x.item()


@fault(RankFailed, says=r"rank 1 called sys\.exit\(3\)")
def exits_when_it_has_nothing_to_do(right):
    """A rank that has nothing to do ends its process, and the others wait."""
    x = torch.ones(1)
    if dist.get_rank() == 1 and not right:
        sys.exit(3)  # raises
    dist.all_reduce(x)
    return x.item()


@fault(KeyError, world_size=3, says="bias")
def state_dict_lacks_a_key_on_one_rank(right):
    """Rank 0 loaded another file; it raises between two broadcasts."""
    state = {"weight": torch.ones(1), "bias": torch.ones(1)}
    if dist.get_rank() == 0 and not right:
        del state["bias"]
    for name in ("weight", "bias"):
        dist.broadcast(state[name], src=0)  # raises
    return sorted(state)
