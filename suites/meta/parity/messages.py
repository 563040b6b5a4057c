"""Messages: by tag, from any source, in batches, of several dtypes."""

from __future__ import annotations

import torch
import torch.distributed as dist


def _neighbours():
    return (dist.get_rank() + 1) % 4, (dist.get_rank() - 1) % 4


def ring_of_isend_and_irecv():
    right, left = _neighbours()
    x, y = torch.tensor([dist.get_rank()]), torch.zeros(1, dtype=torch.int64)
    sending, receiving = dist.isend(x, right), dist.irecv(y, left)
    receiving.wait()
    sending.wait()
    return y.tolist()


def ring_of_every_dtype():
    right, left = _neighbours()
    seen = []
    for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.int16):
        y = torch.zeros(2, dtype=dtype)
        sending = dist.isend(torch.tensor([dist.get_rank(), 1]).to(dtype), right)
        dist.recv(y, left)
        sending.wait()
        seen.append((str(y.dtype), y.tolist()))
    return seen


def both_ways_in_a_batch():
    right, left = _neighbours()
    x, from_left, from_right = torch.tensor([float(dist.get_rank())]), torch.zeros(1), torch.zeros(1)
    ops = [
        dist.P2POp(dist.irecv, from_left, left),
        dist.P2POp(dist.irecv, from_right, right),
        dist.P2POp(dist.isend, x, right),
        dist.P2POp(dist.isend, x, left),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return from_left.item(), from_right.item()


def messages_that_only_look_strided():
    right, left = _neighbours()
    seen = []
    for sent in (torch.arange(8.0).as_strided((1, 3), (5, 1)), torch.ones(0, 3).t(), torch.arange(4.0)[::4]):
        taken = torch.zeros(16).as_strided(sent.shape, sent.stride())
        sending = dist.isend(sent + dist.get_rank(), right)
        dist.recv(taken, left)
        sending.wait()
        seen.append((tuple(taken.shape), taken.tolist()))
    return seen


def batch_with_tags():
    right, left = _neighbours()
    out = [torch.zeros(1) for _ in range(2)]
    ops = [dist.P2POp(dist.isend, torch.tensor([dist.get_rank() + 0.5 * tag]), right, tag=tag) for tag in (0, 1)]
    ops += [dist.P2POp(dist.irecv, out[tag], left, tag=tag) for tag in (1, 0)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [y.item() for y in out]


def chain_of_blocking_calls():
    rank, x = dist.get_rank(), torch.tensor([1.0])
    if rank > 0:
        source = dist.recv(x, rank - 1)
        x = 2 * x + source
    if rank < 3:
        dist.send(x, rank + 1)
    return x.item()


def equal_tags_keep_their_order():
    x, seen = torch.zeros(1), []
    for n in range(5):
        if dist.get_rank() == 2:
            dist.send(torch.tensor([float(n)]), 1, tag=7)
        elif dist.get_rank() == 1:
            dist.recv(x, 2, tag=7)
            seen.append(x.item())
    return seen


def any_source_with_a_tag():
    if dist.get_rank() == 3:
        x = torch.zeros(1)
        return sorted((dist.recv(x, tag=5), x.item()) for _ in range(3))
    dist.send(torch.tensor([float(dist.get_rank())]), 3, tag=5)
    return None


def rank_0_as_a_server():
    x = torch.zeros(1)
    if dist.get_rank() == 0:
        for _ in range(3):
            source = dist.recv(x)
            dist.send(10 * x, source)
        return None
    dist.send(torch.tensor([float(dist.get_rank())]), 0)
    dist.recv(x, 0)
    return x.item()


def any_source_in_a_group():
    group = dist.new_group([3, 1, 2])
    rank, x = dist.get_rank(), torch.zeros(1)
    if rank == 2:
        return sorted((dist.recv(x, group=group), x.item()) for _ in range(2))
    if rank:
        dist.send(torch.tensor([float(rank)]), 2, group=group)
    return None


def by_the_number_in_a_group():
    group = dist.new_group([1, 3])
    x = torch.zeros(1)
    if dist.get_rank() == 1:
        dist.send(torch.tensor([4.0]), group=group, group_dst=1)
    elif dist.get_rank() == 3:
        source = dist.recv(x, group=group, group_src=0)
        return source, x.item()
    return None


def messages_around_collectives():
    right, left = _neighbours()
    x, y = torch.tensor([float(dist.get_rank())]), torch.zeros(1)
    receiving = dist.irecv(y, left)
    total = x.clone()
    dist.all_reduce(total)
    sending = dist.isend(x, right)
    dist.barrier()
    receiving.wait()
    sending.wait()
    return total.item(), y.item()


def empty_message():
    x = torch.zeros(0)
    if dist.get_rank() == 0:
        dist.send(x, 1)
    elif dist.get_rank() == 1:
        return dist.recv(x, 0), x.tolist()
    return None


def large_messages_both_ways():
    right, left = _neighbours()
    x, y = torch.full((1 << 18,), float(dist.get_rank())), torch.zeros(1 << 18)
    sending = dist.isend(x, right)
    dist.recv(y, left)
    sending.wait()
    return y.sum().item()


# -- what one world refuses ------------------------------------------------------------------------


def send_to_oneself_that_nobody_waits_for():
    dist.isend(torch.ones(1), dist.get_rank(), tag=9)
    return "posted"


def receive_from_oneself():
    dist.recv(torch.ones(1), dist.get_rank())
