"""Every reduce-op on the dtypes that it supports; small integers, so that the order of addition cannot matter."""

from __future__ import annotations

import torch
import torch.distributed as dist

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.int8, torch.uint8, torch.int32, torch.int64)


def _all_reduce(op, dtypes):
    seen = []
    for dtype in dtypes:
        x = torch.tensor([dist.get_rank() + 1, 3, dist.get_rank() % 2]).to(dtype)
        dist.all_reduce(x, op=op)
        seen.append((str(x.dtype), x.tolist()))
    return seen


def sums():
    return _all_reduce(dist.ReduceOp.SUM, (*FLOATS, *WHOLE, torch.bool, torch.complex64, torch.complex128))


def products():
    return _all_reduce(dist.ReduceOp.PRODUCT, (*FLOATS, *WHOLE, torch.bool))


def minima():
    return _all_reduce(dist.ReduceOp.MIN, (*FLOATS, *WHOLE, torch.bool))


def maxima():
    return _all_reduce(dist.ReduceOp.MAX, (*FLOATS, *WHOLE, torch.bool))


def averages():
    return _all_reduce(dist.ReduceOp.AVG, (*FLOATS, torch.complex64))


def bitwise_and():
    return _all_reduce(dist.ReduceOp.BAND, (*WHOLE, torch.bool))


def bitwise_or():
    return _all_reduce(dist.ReduceOp.BOR, (*WHOLE, torch.bool))


def bitwise_xor():
    return _all_reduce(dist.ReduceOp.BXOR, (*WHOLE, torch.bool))


def sums_of_sparse_tensors():
    """Sum sparse tensors.

    They have places of one rank, of two, none, and repeated ones; elements of one number and of several.
    """
    rank, seen = dist.get_rank(), []
    for places in ([rank], [rank // 2, 3], [], [3 - rank, 3 - rank]):
        for dtype, shape in ((torch.float64, (0,)), (torch.int64, (2,)), (torch.float32, ())):
            values = torch.full((len(places), *shape), rank + 1).to(dtype)
            x = torch.sparse_coo_tensor([places], values, (4, *shape))
            dist.all_reduce(x)
            y = x.coalesce()
            seen.append((x.is_coalesced(), y.indices().tolist(), y.values().tolist(), str(x.dtype)))
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return [*seen, x.to_dense().tolist()]


def reduce_with_every_op_to_every_root():
    seen = []
    for root in range(4):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.BXOR):
            x = torch.tensor([dist.get_rank() + 1, 3])
            dist.reduce(x, root, op=op)
            if dist.get_rank() == root:
                seen.append(x.tolist())
    return seen


def reduce_scatter_with_every_op():
    seen = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.BOR):
        out = torch.zeros(2, dtype=torch.int64)
        dist.reduce_scatter(out, list((torch.arange(8) + dist.get_rank()).split(2)), op=op)
        seen.append(out.tolist())
    return seen


def integers_that_overflow():
    x = torch.tensor([100 + dist.get_rank()], dtype=torch.int8)
    dist.all_reduce(x)
    return x.tolist()


def infinities():
    x = torch.tensor([float("inf") if dist.get_rank() == 2 else 1.0, float("-inf")])
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x.tolist()


def sum_of_halves_by_reduce_scatter():
    seen = []
    for dtype in (torch.float16, torch.bfloat16):
        out = torch.zeros(1, dtype=dtype)
        dist.reduce_scatter_tensor(out, torch.arange(4).to(dtype))
        seen.append((str(out.dtype), out.tolist()))
    return seen


def reduce_in_place_on_every_rank():
    """Return the values that a reduce leaves on every rank, also on those that are not its destination."""
    x = torch.arange(8.0) + dist.get_rank()
    dist.reduce(x, 2)
    return x.tolist()


def maxima_and_minima_of_nan():
    """Reduce a NaN of rank 1 and numbers of the others."""
    seen = []
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        x = torch.full((8,), float("nan") if dist.get_rank() == 1 else dist.get_rank() + 1.0)
        dist.all_reduce(x, op)
        seen.append(x.tolist())
    return seen


# -- what one world refuses ------------------------------------------------------------------------


def short_integers():
    return _all_reduce(dist.ReduceOp.SUM, [torch.int16])


def multiplied_sums():
    return _all_reduce(dist._make_nccl_premul_sum(2.0), [torch.float32])
