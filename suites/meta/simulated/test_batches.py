"""With the semantics of nccl, a batch that sends to a peer and receives from it meets one batch of the peer."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import CollectiveMismatch
from pdlcheck.worlds import get_world


def peer():
    return 1 - dist.get_rank()


def send(value):
    return dist.P2POp(dist.isend, torch.tensor([float(value)]), peer())


def recv(into):
    return dist.P2POp(dist.irecv, into, peer())


def batch(*operations):
    for work in dist.batch_isend_irecv([*operations]):
        work.wait()


def exchange(rounds, *, divided):
    """Exchange numbers in batches; with ``divided``, rank 1 receives and sends in two calls in the last round."""
    found = []
    for number in range(rounds):
        into = torch.empty(1)
        if divided and number == rounds - 1 and dist.get_rank() == 1:
            batch(recv(into))
            batch(send(10 + number))
        else:
            batch(send(10 * dist.get_rank() + number), recv(into))
        found.append(into.item())
    return found


def one_ahead():
    """Exchange as 1F1B does: rank 0 sends one message ahead, and receives the last one alone."""
    into = torch.empty(1)
    if dist.get_rank() == 0:
        batch(send(0))
        batch(send(1), recv(into))
        batch(recv(into))
    else:
        batch(recv(into))
        batch(send(0), recv(into))
        batch(send(1))
    return into.item()


def in_one_direction():
    """Send two messages in one batch, and receive them in two calls."""
    first, second = torch.empty(1), torch.empty(1)
    if dist.get_rank() == 0:
        batch(send(1), send(2))
        return [1.0, 2.0]
    batch(recv(first))
    batch(recv(second))
    return [first.item(), second.item()]


def around_a_ring():
    """Send to the next rank and receive from the last one: rank 0 in one batch, the others in two calls."""
    rank, size = dist.get_rank(), dist.get_world_size()
    into = torch.empty(1)
    ops = [
        dist.P2POp(dist.irecv, into, (rank - 1) % size),
        dist.P2POp(dist.isend, torch.tensor([float(rank)]), (rank + 1) % size),
    ]
    for each in [ops] if rank == 0 else [[op] for op in ops]:
        batch(*each)
    return into.item()


def meets_plain_calls():
    """Send in a batch of one operation, and receive by a plain call."""
    into = torch.empty(1)
    if dist.get_rank() == 0:
        batch(send(1))
        dist.recv(into, 1)
    else:
        dist.recv(into, 0)
        batch(send(2))
    return into.item()


def keeps_what_its_caller_holds():
    """Return whether a tensor of a function outlives it, because the function has exchanged messages in a batch."""

    def exchanges():
        large = torch.ones(3)
        batch(send(1), recv(torch.empty(1)))
        return weakref.ref(large)

    held = exchanges()
    gc.collect()
    return held() is not None


def run(program, *args, semantics="nccl", seed=0, world_size=2, **kwargs):
    return get_world("sim", semantics=semantics, seed=seed).run(program, *args, world_size=world_size, **kwargs)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_a_batch_that_the_peer_divides_is_an_error_on_nccl(rounds, seed):
    words = r"rank 0 sends to rank 1 and receives from it in one batch, rank 1 in two calls: nccl does not define"
    with pytest.raises(CollectiveMismatch, match=words) as caught:
        run(exchange, rounds, divided=True, seed=seed)
    assert "rank 0: one batch of " in str(caught.value)
    assert str(caught.value).count("test_batches.py:") >= 4, "the lines of both calls on both ranks"
    assert str(caught.value).count("called at ") == 4, "all calls are in one helper function"
    assert "post both with one batch_isend_irecv on rank 1" in str(caught.value)


@pytest.mark.parametrize("seed", range(10))
def test_batches_that_meet_whole_are_right(seed):
    assert run(exchange, 3, divided=False, seed=seed) == [[10.0, 11.0, 12.0], [0.0, 1.0, 2.0]]
    assert run(one_ahead, seed=seed) == [1.0, 1.0]
    assert run(in_one_direction, seed=seed) == [[1.0, 2.0]] * 2


@pytest.mark.parametrize("seed", range(3))
def test_a_batch_may_meet_calls_of_several_peers_and_one_operation_a_plain_call(seed):
    assert run(around_a_ring, seed=seed, world_size=3) == [2.0, 0.0, 1.0]
    assert run(meets_plain_calls, seed=seed) == [2.0, 1.0]


def test_elsewhere_a_batch_may_be_divided():
    assert run(exchange, 2, divided=True, semantics="rendezvous") == [[10.0, 11.0], [0.0, 1.0]]


def test_a_batch_that_has_ended_keeps_no_tensor_alive():
    assert run(keeps_what_its_caller_holds) == [False, False]
