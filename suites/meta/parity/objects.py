"""Python objects, pickled by torch."""

from __future__ import annotations

import torch
import torch.distributed as dist


def _mine():
    rank = dist.get_rank()
    return {"rank": rank, "text": "x" * rank, "nested": [None, (rank, 0.5)]}


def all_gather_of_objects():
    out = [None] * 4
    dist.all_gather_object(out, _mine())
    return out


def gather_of_objects():
    out = [None] * 4 if dist.get_rank() == 2 else None
    dist.gather_object(_mine(), out, dst=2)
    return out


def broadcast_of_objects():
    objects = [_mine(), "second", 3] if dist.get_rank() == 3 else [None] * 3
    dist.broadcast_object_list(objects, src=3)
    return objects


def scatter_of_objects():
    out = [None]
    dist.scatter_object_list(out, [["for", r] for r in range(4)] if dist.get_rank() == 1 else None, src=1)
    return out


def messages_of_objects():
    if dist.get_rank() == 1:
        dist.send_object_list([_mine(), "more"], dst=2)
    elif dist.get_rank() == 2:
        out = [None, None]
        return dist.recv_object_list(out, src=1), out
    return None


def objects_in_a_group():
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    gathered, sent = [None] * 2, [dist.get_rank()]
    dist.all_gather_object(gathered, _mine(), group=group)
    dist.broadcast_object_list(sent, src=3, group=group)
    return gathered, sent


def tensors_as_objects():
    out = [None] * 4
    dist.all_gather_object(out, torch.arange(dist.get_rank() + 1))
    return [x.tolist() for x in out]
