"""Programs that depend on the network: the end of a send, the meaning of tags, the order of addition."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..catalogue.hazards import peer


def head_to_head(numel):
    x, y = torch.full((numel,), float(dist.get_rank())), torch.empty(numel)
    dist.send(x, peer())
    dist.recv(y, peer())
    return y[0].item()


def head_to_tail(numel):
    x, y = torch.full((numel,), float(dist.get_rank())), torch.empty(numel)
    for is_sender in (dist.get_rank() == 0, dist.get_rank() == 1):
        if is_sender:
            dist.send(x, peer())
        else:
            dist.recv(y, peer())
    return y[0].item()


def both_post_their_send_first():
    x, y = torch.full((2,), float(dist.get_rank())), torch.empty(2)
    works = [dist.isend(x, peer()), dist.irecv(y, peer())]
    for work in works:
        work.wait()
    return y[0].item()


def a_batch_to_oneself(order):
    """Send two messages to oneself in one batch, in the given order; return the received values."""
    given, taken = [torch.ones(1), torch.full((1,), 2.0)], [torch.zeros(1), torch.zeros(1)]
    left = {"send": iter(given), "recv": iter(taken)}
    kinds = {"send": dist.isend, "recv": dist.irecv}
    for work in dist.batch_isend_irecv([dist.P2POp(kinds[op], next(left[op]), dist.get_rank()) for op in order]):
        work.wait()
    return [x.item() for x in taken]


def both_post_a_batch():
    x, y = torch.full((2,), float(dist.get_rank())), torch.empty(2)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer()), dist.P2POp(dist.irecv, y, peer())]):
        work.wait()
    return y[0].item()


def tags(asked):
    """Send 1 with tag 1 and 2 with tag 2 from rank 0; rank 1 receives the tags in the order ``asked``."""
    if dist.get_rank() == 0:
        works = [dist.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in (1, 2)]
    else:
        got = {tag: torch.zeros(1) for tag in asked}
        works = [dist.irecv(x, 0, tag=tag) for tag, x in got.items()]
    for work in works:
        work.wait()
    return None if dist.get_rank() == 0 else {tag: x.item() for tag, x in got.items()}


def summed_in_float32():
    """Return 1e8 + 1 - 1e8, which depends on the order of addition."""
    x = torch.tensor([1e8, 1.0, -1e8][dist.get_rank()])
    dist.all_reduce(x)
    return x.item()
