"""Small programs of torch.distributed: the results of every rank, and the faults of the faulty ones."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def all_reduce():
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()


def all_gather():
    out = [torch.zeros(2) for _ in range(dist.get_world_size())]
    dist.all_gather(out, torch.full((2,), float(dist.get_rank())))
    return torch.cat(out).tolist()


def all_gather_flat():
    out = torch.zeros(2 * dist.get_world_size())
    dist.all_gather_into_tensor(out, torch.full((2,), float(dist.get_rank())))
    return out.tolist()


def reduce_scatter():
    out = torch.zeros(1)
    dist.reduce_scatter(out, list(torch.arange(4.0).split(1)))
    return out.item()


def reduce_scatter_flat():
    out = torch.zeros(1)
    dist.reduce_scatter_tensor(out, torch.arange(4.0))
    return out.item()


def all_to_all():
    out = torch.zeros(4)
    dist.all_to_all_single(out, torch.arange(4.0) + 10 * dist.get_rank())
    return out.tolist()


def all_to_all_uneven():
    rank, sizes = dist.get_rank(), [1, 2, 3, 4]
    out = torch.zeros(sum(sizes))
    dist.all_to_all_single(out, torch.full((4 * (rank + 1),), float(rank)), sizes, [rank + 1] * 4)
    return out.tolist()


def gather():
    out = [torch.zeros(1) for _ in range(4)] if dist.get_rank() == 1 else None
    dist.gather(torch.tensor([float(dist.get_rank())]), out, dst=1)
    return torch.cat(out).tolist() if out else None


def scatter():
    out = torch.zeros(1)
    dist.scatter(out, list(torch.arange(4.0).split(1)) if dist.get_rank() == 2 else None, src=2)
    return out.item()


def broadcast():
    x = torch.tensor([float(dist.get_rank())])
    dist.broadcast(x, 2)
    return x.item()


def reduce_max():
    x = torch.tensor([float(dist.get_rank())])
    dist.reduce(x, 2, op=dist.ReduceOp.MAX)
    return x.item() if dist.get_rank() == 2 else None


def objects():
    gathered: list[object] = [None] * 4
    dist.all_gather_object(gathered, {"rank": dist.get_rank()})
    sent = [dist.get_rank()]
    dist.broadcast_object_list(sent, src=1)
    return gathered, sent


def ring_in_batches():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x, y = torch.tensor([float(rank)]), torch.zeros(1)
    ops = [
        dist.P2POp(dist.isend, x, (rank + 1) % world_size),
        dist.P2POp(dist.irecv, y, (rank - 1) % world_size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return y.item()


def from_any_rank():
    if dist.get_rank():
        dist.send(torch.tensor([float(dist.get_rank())]), 0)
        return None
    x = torch.zeros(1)
    return sorted((dist.recv(x), x.item()) for _ in range(3))


def tags_out_of_order():
    x = torch.zeros(1)
    if dist.get_rank() == 0:
        works = [dist.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in (1, 2)]
        for work in works:
            work.wait()
    elif dist.get_rank() == 1:
        seen = []
        for tag in (2, 1):
            dist.recv(x, 0, tag=tag)
            seen.append(x.item())
        return seen
    return None


def sub_group():
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, group=group)
    return x.item(), dist.get_rank(group), dist.get_process_group_ranks(group)


def coalesced():
    a, b = torch.ones(2), torch.ones(3)
    with dist._coalescing_manager():
        dist.all_reduce(a)
        dist.all_reduce(b)
    return a.tolist() + b.tolist()


def asynchronous():
    x = torch.ones(1)
    future = dist.all_reduce(x, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].item() * 2).wait()


def average():
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    return x.item()


EXPECTED = [
    (all_reduce, [10.0] * 4),
    (all_gather, [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]] * 4),
    (all_gather_flat, [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]] * 4),
    (reduce_scatter, [0.0, 4.0, 8.0, 12.0]),
    (reduce_scatter_flat, [0.0, 4.0, 8.0, 12.0]),
    (all_to_all, [[r, r + 10.0, r + 20.0, r + 30.0] for r in range(4)]),
    (all_to_all_uneven, [[0.0] + [1.0] * 2 + [2.0] * 3 + [3.0] * 4] * 4),
    (gather, [None, [0.0, 1.0, 2.0, 3.0], None, None]),
    (scatter, [0.0, 1.0, 2.0, 3.0]),
    (broadcast, [2.0] * 4),
    (reduce_max, [None, None, 3.0, None]),
    (objects, [([{"rank": r} for r in range(4)], [1])] * 4),
    (ring_in_batches, [3.0, 0.0, 1.0, 2.0]),
    (from_any_rank, [[(1, 1.0), (2, 2.0), (3, 3.0)], None, None, None]),
    (tags_out_of_order, [None, [2.0, 1.0], None, None]),
    (sub_group, [None, (4.0, 0, [1, 3]), None, (4.0, 1, [1, 3])]),
    (coalesced, [[4.0] * 5] * 4),
    (asynchronous, [8.0] * 4),
    (average, [1.5] * 4),
]


def train_ddp():
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 1))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.00005)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


# -- faulty programs, and twins ------------------------------------------------------------------


def ring_of_sends():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x, y = torch.ones(3), torch.zeros(3)
    dist.send(x, (rank + 1) % world_size)
    dist.recv(y, (rank - 1) % world_size)


def ring_of_pairs():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x, y = torch.ones(3), torch.zeros(3)
    sending = dist.isend(x, (rank + 1) % world_size)
    dist.recv(y, (rank - 1) % world_size)
    sending.wait()


def early_leaver():
    for _ in range(2 if dist.get_rank() == 1 else 3):
        dist.barrier()


def other_shapes():
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


def other_dtypes():
    dist.all_reduce(torch.ones(2, dtype=torch.float32 if dist.get_rank() else torch.int32))


def other_reduce_ops():
    dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)


def other_roots():
    dist.broadcast(torch.ones(2), src=dist.get_rank())


def other_order():
    x = torch.ones(2)
    if dist.get_rank():
        dist.all_reduce(x)
        dist.broadcast(x, 0)
    else:
        dist.broadcast(x, 0)
        dist.all_reduce(x)


def other_order_of_equal_calls():
    a, b = torch.ones(2), torch.zeros(2)
    for x in (b, a) if dist.get_rank() else (a, b):
        dist.all_reduce(x)


def short_buffer():
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1)
    else:
        dist.recv(torch.ones(2), 0)


MISMATCHES = [
    ("the shape", other_shapes),
    ("the dtype", other_dtypes),
    ("the reduce-op", other_reduce_ops),
    ("the root", other_roots),
    ("the operation", other_order),
    ("the order", other_order_of_equal_calls),
    ("the number of elements", short_buffer),
]
DEADLOCKS = [ring_of_sends, early_leaver]
