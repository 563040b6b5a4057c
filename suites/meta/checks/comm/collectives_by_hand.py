"""Collectives made of one all_gather, or of messages around a ring: correct ones and broken ones."""

from __future__ import annotations

import torch
import torch.distributed as dist


def everyone(tensor, group=None):
    """Return the tensors of all ranks."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(tensors, tensor, group=group)
    return tensors


def overwrite(tensor, value):
    tensor.copy_(value)
    return tensor


def summed(tensor, group=None):
    return overwrite(tensor, sum(everyone(tensor, group)))


def never_reduced(tensor, group=None):
    return overwrite(tensor, everyone(tensor, group)[dist.get_rank(group)])


def averaged(tensor, group=None):
    return overwrite(tensor, sum(everyone(tensor, group)) / dist.get_world_size(group))


def maximum(tensor, group=None):
    return overwrite(tensor, torch.stack(everyone(tensor, group)).amax(0))


def ring(reduce_short=0, gather_short=0, way=1, first=0, split=torch.tensor_split, combine=torch.add):
    """Return an all-reduce around a ring, whose phases may be some steps short."""

    def all_reduce(tensor, group=None):
        rank, count = dist.get_rank(group), dist.get_world_size(group)
        chunks = [*split(tensor.view(-1), count)]

        def exchange(outgoing, add):
            out, into = ((way * (rank * way - place) + first) % count for place in (outgoing, outgoing + 1))
            arrived = torch.empty_like(chunks[into])
            sends = dist.P2POp(dist.isend, chunks[out], group=group, group_peer=(rank + way) % count)
            receives = dist.P2POp(dist.irecv, arrived, group=group, group_peer=(rank - way) % count)
            for work in dist.batch_isend_irecv([sends, receives]):
                work.wait()
            chunks[into].copy_(combine(chunks[into], arrived) if add else arrived)

        for step in range(count - 1 - reduce_short):
            exchange(step, True)
        for step in range(count - 1 - gather_short):
            exchange(step - 1, False)

    return all_reduce


def in_its_own_order(tensor, group=None):
    """Add the tensors in an order that begins with this rank's own, so that rounding differs between ranks."""
    tensors, rank = everyone(tensor, group), dist.get_rank(group)
    return overwrite(tensor, sum(tensors[rank:] + tensors[:rank], start=torch.zeros_like(tensor)))


def scattered(tensor, group=None):
    return sum(everyone(tensor, group)).tensor_split(dist.get_world_size(group))[dist.get_rank(group)]


def shifted_by_one(tensor, group=None):
    tensors = everyone(tensor, group)
    return tensors[-1:] + tensors[:-1]


def along_the_last_dimension(tensor, group=None):
    return torch.cat(everyone(tensor, group), dim=-1)


def copied(tensor, src=0, group=None):
    place = src if group is None else dist.get_group_rank(group, src)
    return overwrite(tensor, everyone(tensor, group)[place])
