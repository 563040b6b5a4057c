"""Every reduce-op, on random numbers in each call that reduces, and on every dtype."""

from __future__ import annotations

import math
import operator
from functools import partial, reduce

import torch
import torch.distributed as dist

from ..parity import reductions
from ..parity.reductions import FLOATS, WHOLE
from .entry import WORLD_SIZE, Feature, everywhere, given

FACTOR = 0.3


def _sum(values):
    return reduce(operator.add, values)


# name -> the function of a single process on the values of all ranks
ALONE = {
    "SUM": _sum,
    "AVG": lambda values: _sum(values) / len(values),
    "PREMUL_SUM": lambda values: _sum([FACTOR * value for value in values]),
    "PRODUCT": lambda values: reduce(operator.mul, values),
    "MIN": lambda values: torch.stack(values).amin(0),
    "MAX": lambda values: torch.stack(values).amax(0),
    "BAND": lambda values: reduce(operator.and_, values),
    "BOR": lambda values: reduce(operator.or_, values),
    "BXOR": lambda values: reduce(operator.xor, values),
}


def _op(name):
    return dist._make_nccl_premul_sum(FACTOR) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)


def _input(name, rank, n):
    x = given(rank, n)
    return (1000 * x).long() if name in ("BAND", "BOR", "BXOR") else x


def _of_all(name, n):
    return [_input(name, rank, n) for rank in range(WORLD_SIZE)]


def all_reduce(name):
    x = _input(name, dist.get_rank(), 6)
    dist.all_reduce(x, op=_op(name))
    return x


def all_reduce_alone(name):
    return everywhere(ALONE[name](_of_all(name, 6)))


def reduce_to_every_root():
    seen = {}
    for name in ALONE:
        for root in range(WORLD_SIZE):
            x = _input(name, dist.get_rank(), 3)
            dist.reduce(x, root, op=_op(name))
            if dist.get_rank() == root:
                seen[name] = x
    return seen


def reduce_to_every_root_alone():
    return everywhere({name: ALONE[name](_of_all(name, 3)) for name in ALONE})


def reduce_scatter():
    seen = {}
    for name in ALONE:
        x = _input(name, dist.get_rank(), 8)
        seen[name] = torch.zeros(2, dtype=x.dtype)
        dist.reduce_scatter(seen[name], list(x.split(2)), op=_op(name))
    return seen


def reduce_scatter_tensor():
    seen = {}
    for name in ALONE:
        x = _input(name, dist.get_rank(), 8)
        seen[name] = torch.zeros(2, dtype=x.dtype)
        dist.reduce_scatter_tensor(seen[name], x, op=_op(name))
    return seen


def reduce_scatter_alone():
    return [{name: ALONE[name](_of_all(name, 8)).split(2)[rank] for name in ALONE} for rank in range(WORLD_SIZE)]


# -- dtypes ----------------------------------------------------------------------------------------

COMPLEX = (torch.complex64, torch.complex128)
# program -> reduce-op, its dtypes
DTYPES = {
    reductions.sums: ("SUM", (*FLOATS, *WHOLE, torch.bool, *COMPLEX)),
    reductions.averages: ("AVG", (*FLOATS, torch.complex64)),
    reductions.products: ("PRODUCT", (*FLOATS, *WHOLE, torch.bool)),
    reductions.minima: ("MIN", (*FLOATS, *WHOLE, torch.bool)),
    reductions.maxima: ("MAX", (*FLOATS, *WHOLE, torch.bool)),
    reductions.bitwise_and: ("BAND", (*WHOLE, torch.bool)),
    reductions.bitwise_or: ("BOR", (*WHOLE, torch.bool)),
    reductions.bitwise_xor: ("BXOR", (*WHOLE, torch.bool)),
    reductions.short_integers: ("SUM", (torch.int16,)),
}


def dtypes_alone(name, dtypes):
    seen = []
    for dtype in dtypes:
        values = [torch.tensor([rank + 1, 3, rank % 2]).to(dtype) for rank in range(WORLD_SIZE)]
        seen.append((str(dtype), ALONE[name](values).tolist()))
    return everywhere(seen)


FEATURES = [
    *(Feature(f"all_reduce {name}", partial(all_reduce, name), partial(all_reduce_alone, name)) for name in ALONE),
    Feature("reduce, every reduce-op and root", reduce_to_every_root, reduce_to_every_root_alone),
    Feature("reduce_scatter, every reduce-op", reduce_scatter, reduce_scatter_alone),
    Feature("reduce_scatter_tensor, every reduce-op", reduce_scatter_tensor, reduce_scatter_alone),
    *(
        Feature(
            f"{name}, {len(dtypes)} dtypes" if len(dtypes) > 1 else f"{name} of {str(dtypes[0])[6:]}",
            program,
            partial(dtypes_alone, name, dtypes),
        )
        for program, (name, dtypes) in DTYPES.items()
    ),
    Feature("SUM that overflows int8", reductions.integers_that_overflow, lambda: everywhere([406 - 512])),
    Feature("MAX of infinities", reductions.infinities, lambda: everywhere([math.inf, -math.inf])),
]
