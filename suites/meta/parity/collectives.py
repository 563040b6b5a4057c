"""Collectives: each form of each call, roots other than 0, the dtypes, asynchronous operations."""

from __future__ import annotations

import warnings
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)


def _mine(n=2, dtype=torch.float32):
    return torch.arange(n).to(dtype) + 10 * dist.get_rank()


def _told(*tensors):
    return [(str(tensor.dtype), tensor.tolist()) for tensor in tensors]


def all_gather_of_every_dtype():
    seen = []
    for dtype in (*DTYPES, torch.complex64):
        out = [torch.zeros(2, dtype=dtype) for _ in range(4)]
        dist.all_gather(out, (torch.arange(2) + dist.get_rank()).to(dtype))
        seen += _told(*out)
    return seen


def broadcast_of_every_dtype():
    seen = []
    for root, dtype in enumerate((*DTYPES, torch.complex128)):
        x = torch.tensor([dist.get_rank(), 1]).to(dtype)
        dist.broadcast(x, root % 4)
        seen += _told(x)
    return seen


def collectives_of_shapes_that_differ_in_ones():
    """Reduce a loss without dimensions here, and of one element there: only the number of elements counts."""
    odd = dist.get_rank() % 2
    total = torch.ones(()) if odd else torch.ones(1)
    dist.all_reduce(total)
    row = torch.full((1, 2) if odd else (2,), float(dist.get_rank()))
    everyone = [torch.zeros_like(row) for _ in range(4)]
    dist.all_gather(everyone, row)
    dist.broadcast(row, 1)
    mine = torch.zeros(2, 1) if odd else torch.zeros(2)
    dist.reduce_scatter_tensor(mine, torch.arange(8.0).view(8, 1) if odd else torch.arange(8.0))
    scattered = torch.zeros(2, 1, 2) if odd else torch.zeros(2, 2)
    dist.scatter(scattered, [torch.full((2, 2), float(i)) for i in range(4)] if dist.get_rank() == 2 else None, 2)
    return _told(total, *everyone, row, mine, scattered)


def all_gather_coalesced():
    out = [[torch.zeros(1), torch.zeros(2)] for _ in range(4)]
    dist.all_gather_coalesced(out, [_mine(1), _mine(2)])
    return [_told(*of_rank) for of_rank in out]


def methods_of_a_group():
    """Call the group's methods by their overloads: with one tensor, and with the options as separate arguments."""
    group, rank, limit = dist.group.WORLD, dist.get_rank(), timedelta(seconds=30)
    x, y, z = _mine(), _mine(), _mine()
    group.allreduce(x).wait()
    group.allreduce(y, dist.ReduceOp.MAX).wait()
    group.allreduce([z], op=dist.ReduceOp.MIN, timeout=limit).wait()
    sent, summed, largest = _mine(), _mine(), _mine()
    group.broadcast(sent, root=2).wait()
    group.reduce(summed, 1).wait()
    group.reduce(largest, 3, dist.ReduceOp.MAX, limit).wait()
    everyone, gathered = [torch.zeros(2) for _ in range(4)], [torch.zeros(2) for _ in range(4)]
    group.allgather(everyone, _mine(), limit).wait()
    group.gather(gathered if rank == 1 else [], _mine(), root=1).wait()
    part, product, dealt = torch.zeros(2), torch.zeros(2), torch.zeros(4)
    group.scatter(part, [_mine() + i for i in range(4)] if rank == 3 else [], 3, timeout=limit).wait()
    group.reduce_scatter(product, [_mine() + i for i in range(4)], dist.ReduceOp.PRODUCT).wait()
    group.alltoall_base(dealt, _mine(4), [], [], timeout=limit).wait()
    group.barrier(timeout=limit).wait()
    ours = [summed] * (rank == 1) + [largest] * (rank == 3)  # on other ranks they hold backend-specific leftovers
    return _told(x, y, z, sent, *ours, *everyone, *gathered, part, product, dealt)


def all_to_all_single_with_splits_of_any_kind():
    seen = []
    for splits in ([2] * 4, (2,) * 4, np.array([2] * 4), [torch.tensor(2)] * 4, [np.int32(2)] * 4):
        out = torch.zeros(8)
        dist.all_to_all_single(out, _mine(8), splits, splits)
        seen += _told(out)
    return seen


def futures_of_all_to_all_single():
    """Return the values of futures; they hold the whole output."""
    seen = []
    for out, splits in ((torch.zeros(8), []), (torch.zeros(4, 2), [1] * 4)):
        work = dist.all_to_all_single(out, _mine(8).view(out.shape), splits, splits, async_op=True)
        value = work.get_future().then(lambda future: _told(*future.value())).wait()
        work.wait()
        with warnings.catch_warnings(action="ignore"):  # deprecated
            seen += [value, _told(*work.result()), work.result()[0].data_ptr() == out.data_ptr()]
    return seen


def all_to_all_single_of_one_row():
    """Exchange without splits: the elements are distributed, not the rows."""
    out, flat = torch.zeros(1, 8), torch.zeros(8)
    dist.all_to_all_single(out, _mine(8).view(1, 8))
    dist.all_to_all_single(flat, _mine(8).view(2, 4))
    return _told(out, flat)


def collectives_into_parameters():
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(4)]
    total, part, row = (torch.nn.Parameter(torch.ones(n)) for n in (1, 2, 8))
    with torch.no_grad():
        dist.all_gather(parameters, _mine())
        dist.reduce_scatter_tensor(part, _mine(8))
        dist.all_gather_into_tensor(row, _mine())
    dist.all_reduce(total)
    dist.broadcast(parameters[0], 1)
    dist.all_gather([torch.zeros(2) for _ in range(4)], part)
    return _told(*parameters, total, part, row)


def all_reduce_coalesced():
    tensors = [_mine(1), _mine(3)]
    dist.all_reduce_coalesced(tensors)
    return _told(*tensors)


def coalescing_manager_waited_for_later():
    tensors = [_mine(2), _mine(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    return _told(*tensors)


def all_to_all_with_uneven_lists_of_rows():
    rank = dist.get_rank()
    out = torch.zeros(4 * (rank + 1), 3)
    dist.all_to_all_single(out, _mine(30).view(10, 3), [rank + 1] * 4, [1, 2, 3, 4])
    return _told(out)


def all_to_all_with_empty_parts():
    rank = dist.get_rank()
    out = torch.zeros(4 if rank == 2 else 0)
    dist.all_to_all_single(out, _mine(1), [1] * 4 if rank == 2 else [0] * 4, [0, 0, 1, 0])
    return _told(out)


def all_to_all_of_integers_later():
    out = torch.zeros(4, dtype=torch.int64)
    dist.all_to_all_single(out, _mine(4, torch.int64), async_op=True).wait()
    return _told(out)


def reduce_scatter_of_matrices():
    out, flat = torch.zeros(2, 2), torch.zeros(2, 2)
    dist.reduce_scatter(out, list(_mine(16).view(4, 2, 2).unbind()))
    dist.reduce_scatter_tensor(flat, _mine(16).view(8, 2))
    return _told(out, flat)


def reduce_scatter_of_pieces_of_different_lengths():
    out = torch.zeros(dist.get_rank() + 1)
    dist.reduce_scatter(out, list(_mine(10).split([1, 2, 3, 4])))
    return _told(out)


def reduce_scatter_later():
    out, flat = torch.zeros(1, dtype=torch.int64), torch.zeros(2)
    works = [
        dist.reduce_scatter(out, list(_mine(4, torch.int64).split(1)), op=dist.ReduceOp.MAX, async_op=True),
        dist.reduce_scatter_tensor(flat, _mine(8), async_op=True),
    ]
    for work in works:
        work.wait()
    return _told(out, flat)


def gather_at_each_root():
    seen = []
    for root in range(4):
        out = [torch.zeros(2) for _ in range(4)] if dist.get_rank() == root else None
        dist.gather(_mine(), out, dst=root)
        seen += _told(*(out or []))
    return seen


if hasattr(dist, "gather_single"):  # since torch 2.14

    def gather_into_one_at_each_root():
        seen = []
        for root in range(4):
            rows = torch.zeros(8) if dist.get_rank() == root else None
            stack = torch.zeros(4, 2) if dist.get_rank() == root else None
            dist.gather_single(_mine(), rows, dst=root)
            dist.gather_into_tensor(_mine(), stack, dst=root)
            seen += _told(rows, stack) if dist.get_rank() == root else []
        return seen


def scatter_from_each_root():
    seen = []
    for root in range(4):
        out = torch.zeros(2, dtype=torch.int64)
        parts = list((_mine(8, torch.int64) + 100).split(2)) if dist.get_rank() == root else None
        dist.scatter(out, parts, src=root)
        seen += _told(out)
    return seen


def gather_and_scatter_later():
    at_root = dist.get_rank() == 3
    gathered = [torch.zeros(1) for _ in range(4)] if at_root else None
    dist.gather(_mine(1), gathered, dst=3, async_op=True).wait()
    out = torch.zeros(1)
    dist.scatter(out, [2 * x for x in gathered] if at_root else None, src=3, async_op=True).wait()
    return _told(out, *(gathered or []))


def waits_in_the_other_order():
    tensors = [_mine(n) for n in (1, 2, 3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    return _told(*tensors)


def different_calls_under_way_at_once():
    total, copy, out = _mine(), _mine(), [torch.zeros(2) for _ in range(4)]
    works = [
        dist.all_reduce(total, async_op=True),
        dist.broadcast(copy, 3, async_op=True),
        dist.all_gather(out, _mine(), async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in works:
        work.wait()
    return _told(total, copy, *out), [work.is_completed() for work in works]


def polled_until_complete():
    x = _mine()
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    work.wait()
    return _told(x)


def chain_of_futures():
    future = dist.all_reduce(_mine(1), async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).then(lambda done: done.value() + 1)
    return _told(doubled.wait())


def futures_collected():
    futures = [dist.all_reduce(_mine(n), async_op=True).get_future() for n in (1, 2)]
    done = torch.futures.collect_all(futures).wait()
    return [_told(*future.value()) for future in done]


def slices_of_a_larger_tensor():
    x = torch.zeros(4, 4) + dist.get_rank()
    dist.all_reduce(x[1])
    dist.broadcast(x[2:], 3)
    return _told(x)


def empty_tensors():
    x, out = torch.zeros(0), [torch.zeros(0) for _ in range(4)]
    dist.all_reduce(x)
    dist.broadcast(x, 1)
    dist.all_gather(out, x)
    return _told(x, *out)


def scalars_of_no_dimension():
    x = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(x)
    out = [torch.tensor(0.0) for _ in range(4)]
    dist.all_gather(out, x + dist.get_rank())
    return _told(x, *out)


def barriers():
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.monitored_barrier()
    return "through"


def all_gather_of_matrices_into_one():
    out = torch.zeros(8, 3)
    dist.all_gather_into_tensor(out, _mine(6).view(2, 3))
    return _told(out)


def all_to_all_of_lists():
    out = [torch.zeros(2) for _ in range(4)]
    dist.all_to_all(out, list(_mine(8).split(2)))
    return _told(*out)


def gather_and_all_gather_of_columns():
    column = _mine(8).view(2, 4)[:, dist.get_rank()]
    everywhere = [torch.zeros(2) for _ in range(4)]
    at_root = [torch.zeros(2) for _ in range(4)] if dist.get_rank() == 1 else None
    dist.all_gather(everywhere, column)
    dist.gather(column, at_root, dst=1)
    piece = torch.zeros(2)
    dist.reduce_scatter(piece, list(_mine(8).view(2, 4).unbind(1)))
    return _told(*everywhere, *(at_root or []), piece)


# -- what one world refuses, or does in another way ------------------------------------------------


def all_gather_into_a_stack():
    out = torch.zeros(4, 2, 3)
    dist.all_gather_into_tensor(out, _mine(6).view(2, 3))
    return _told(out)


def all_gather_of_scalars_into_one():
    out = torch.zeros(4)
    dist.all_gather_into_tensor(out, torch.tensor(float(dist.get_rank())))
    return _told(out)


def broadcast_of_what_gloo_has_no_type_for():
    x = _mine(2, torch.int16).to(torch.uint16)
    dist.broadcast(x, 1)
    return _told(x)


def gather_of_complex_numbers():
    out = [torch.zeros(2, dtype=torch.complex64) for _ in range(4)] if dist.get_rank() == 1 else None
    dist.gather(_mine(2, torch.complex64), out, 1)
    return _told(*(out or []))


def all_to_all_of_lists_of_different_lengths():
    rank = dist.get_rank()
    out = [torch.zeros(rank + 1) for _ in range(4)]
    dist.all_to_all(out, [_mine(r + 1) for r in range(4)])
    return _told(*out)


def all_reduce_of_a_column():
    whole = _mine(8).view(2, 4)
    dist.all_reduce(whole[:, 0])
    return _told(whole)


def broadcast_of_a_column():
    whole = _mine(8).view(2, 4)
    dist.broadcast(whole[:, 0], 1)
    return _told(whole)


def reduce_of_a_column():
    whole = _mine(8).view(2, 4)
    dist.reduce(whole[:, 0], 2)
    return _told(whole) if dist.get_rank() == 2 else None


def scatter_of_columns():
    out = torch.zeros(2)
    dist.scatter(out, list(_mine(8).view(2, 4).unbind(1)) if dist.get_rank() == 3 else None, src=3)
    return _told(out)
