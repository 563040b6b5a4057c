"""Each collective, blocking and with ``async_op``, uneven splits, coalescing, futures."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from ..parity import collectives
from ..parity.collectives import DTYPES
from .entry import WORLD_SIZE, Feature, everywhere, given, mine, of_all

RANKS = range(WORLD_SIZE)
ROOT = 2

# before torch 2.13 only their older names exist
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _wait(work):
    if work is not None:
        work.wait()


def _empty(*shape):
    return [torch.zeros(shape) for _ in RANKS]


def all_reduce(**how):
    x = mine(5)
    _wait(dist.all_reduce(x, **how))
    return x


def reduce(**how):
    x = mine(5)
    _wait(dist.reduce(x, ROOT, **how))
    return x if dist.get_rank() == ROOT else None


def broadcast(**how):
    x = mine(5)
    _wait(dist.broadcast(x, ROOT, **how))
    return x


def all_gather(**how):
    out = _empty(2, 3)
    _wait(dist.all_gather(out, mine(2, 3), **how))
    return out


def all_gather_into_tensor(**how):
    out = torch.zeros(8, 3)
    _wait(dist.all_gather_into_tensor(out, mine(2, 3), **how))
    return out


def gather(**how):
    out = _empty(3) if dist.get_rank() == ROOT else None
    _wait(dist.gather(mine(3), out, dst=ROOT, **how))
    return out


def gather_single(**how):
    out = torch.zeros(8, 3) if dist.get_rank() == ROOT else None
    _wait(dist.gather_single(mine(2, 3), out, dst=ROOT, **how))
    return out


def gather_into_tensor(**how):
    out = torch.zeros(4, 2, 3) if dist.get_rank() == ROOT else None
    _wait(dist.gather_into_tensor(mine(2, 3), out, dst=ROOT, **how))
    return out


def scatter(**how):
    out = torch.zeros(3)
    _wait(dist.scatter(out, list(mine(4, 3).unbind()) if dist.get_rank() == ROOT else None, src=ROOT, **how))
    return out


def reduce_scatter(**how):
    out = torch.zeros(3)
    _wait(dist.reduce_scatter(out, list(mine(4, 3).unbind()), **how))
    return out


def reduce_scatter_tensor(**how):
    out = torch.zeros(2, 3)
    _wait(dist.reduce_scatter_tensor(out, mine(8, 3), **how))
    return out


def all_gather_single(**how):
    out = torch.zeros(8, 3)
    _wait(_all_gather_single(out, mine(2, 3), **how))
    return out


def reduce_scatter_single(**how):
    out = torch.zeros(2, 3)
    _wait(_reduce_scatter_single(out, mine(8, 3), **how))
    return out


def all_to_all(**how):
    out = _empty(3)
    _wait(dist.all_to_all(out, list(mine(4, 3).unbind()), **how))
    return out


def all_to_all_single(**how):
    out = torch.zeros(8, 3)
    _wait(dist.all_to_all_single(out, mine(8, 3), **how))
    return out


def all_to_all_single_with_uneven_splits(**how):
    """Send s + 1 rows from rank r to rank s."""
    rows = dist.get_rank() + 1
    out = torch.zeros(4 * rows, 3)
    _wait(dist.all_to_all_single(out, mine(10, 3), [rows] * 4, [1, 2, 3, 4], **how))
    return out


def all_to_all_of_uneven_lists(**how):
    out = [torch.zeros(dist.get_rank() + 1, 3) for _ in RANKS]
    _wait(dist.all_to_all(out, list(mine(10, 3).split([1, 2, 3, 4])), **how))
    return out


def _at_root(value):
    return [value if rank == ROOT else None for rank in RANKS]


def _parts(*shape, splits):
    """Return ``parts[r][s]``, the input of rank r for rank s."""
    return [x.split(splits) for x in of_all(*shape)]


def _transposed(*shape, splits):
    parts = _parts(*shape, splits=splits)
    return [[parts[source][rank] for source in RANKS] for rank in RANKS]


def _cat(parts):
    return [torch.cat(of_rank) for of_rank in parts]


COLLECTIVES = {
    "all_reduce": (all_reduce, lambda: everywhere(sum(of_all(5)))),
    "reduce": (reduce, lambda: _at_root(sum(of_all(5)))),
    "broadcast": (broadcast, lambda: everywhere(given(ROOT, 5))),
    "all_gather": (all_gather, lambda: everywhere(of_all(2, 3))),
    "all_gather_into_tensor": (all_gather_into_tensor, lambda: everywhere(torch.cat(of_all(2, 3)))),
    "all_gather_single": (all_gather_single, lambda: everywhere(torch.cat(of_all(2, 3)))),
    "gather": (gather, lambda: _at_root(of_all(3))),
    "scatter": (scatter, lambda: list(given(ROOT, 4, 3).unbind())),
    "reduce_scatter": (reduce_scatter, lambda: list(sum(of_all(4, 3)).unbind())),
    "reduce_scatter_tensor": (reduce_scatter_tensor, lambda: list(sum(of_all(8, 3)).split(2))),
    "reduce_scatter_single": (reduce_scatter_single, lambda: list(sum(of_all(8, 3)).split(2))),
    "all_to_all": (all_to_all, lambda: [[x[rank] for x in of_all(4, 3)] for rank in RANKS]),
    "all_to_all_single": (all_to_all_single, lambda: _cat(_transposed(8, 3, splits=2))),
    "all_to_all_single, uneven splits": (
        all_to_all_single_with_uneven_splits,
        lambda: _cat(_transposed(10, 3, splits=[1, 2, 3, 4])),
    ),
    "all_to_all of uneven lists": (
        all_to_all_of_uneven_lists,
        lambda: _transposed(10, 3, splits=[1, 2, 3, 4]),
    ),
}

if hasattr(dist, "gather_single"):  # since torch 2.14
    COLLECTIVES |= {
        "gather_single": (gather_single, lambda: _at_root(torch.cat(of_all(2, 3)))),
        "gather_into_tensor": (gather_into_tensor, lambda: _at_root(torch.stack(of_all(2, 3)))),
    }


# -- coalescing ------------------------------------------------------------------------------------


def coalescing_manager(post, **how):
    inputs = [mine(4), mine(8)]
    with dist._coalescing_manager(**how) as manager:
        outputs = [post(x) for x in inputs]
    if how:
        manager.wait()
    return outputs


def _post_all_reduce(x):
    dist.all_reduce(x)
    return x


def _post_all_gather(x):
    out = torch.zeros(4 * len(x))
    dist.all_gather_into_tensor(out, x)
    return out


def _post_reduce_scatter(x):
    out = torch.zeros(len(x) // 4)
    dist.reduce_scatter_tensor(out, x)
    return out


def _sums():
    return [sum(of_all(4)), sum(of_all(8))]


COALESCED = {
    "all_reduce": (_post_all_reduce, lambda: everywhere(_sums())),
    "all_gather_into_tensor": (_post_all_gather, lambda: everywhere([torch.cat(of_all(4)), torch.cat(of_all(8))])),
    "reduce_scatter_tensor": (_post_reduce_scatter, lambda: [[x.chunk(4)[rank] for x in _sums()] for rank in RANKS]),
}


def all_reduce_coalesced(**how):
    tensors = [mine(4), mine(8)]
    _wait(dist.all_reduce_coalesced(tensors, **how))
    return tensors


# -- work and futures ------------------------------------------------------------------------------


def works_waited_for_in_reverse():
    tensors = [mine(n) for n in (1, 2, 3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    return tensors


def chain_of_futures():
    future = dist.all_reduce(mine(3), async_op=True).get_future()
    return future.then(lambda done: 2 * done.value()[0]).then(lambda done: done.value() + 1).wait()


def futures_collected():
    futures = [dist.all_reduce(mine(n), async_op=True).get_future() for n in (1, 2)]
    return [future.value()[0] for future in torch.futures.collect_all(futures).wait()]


def polled_until_complete():
    x = mine(3)
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    work.wait()
    return x


# -- dtypes and shapes -----------------------------------------------------------------------------


def _gathered_dtypes():
    return everywhere(
        [
            (str(dtype), (torch.arange(2) + rank).to(dtype).tolist())
            for dtype in (*DTYPES, torch.complex64)
            for rank in RANKS
        ]
    )


def _sent_dtypes():
    dtypes = enumerate((*DTYPES, torch.complex128))
    return everywhere([(str(dtype), torch.tensor([root % 4, 1]).to(dtype).tolist()) for root, dtype in dtypes])


def scalars():
    x = mine()
    dist.all_reduce(x)
    return x


def empty_tensors():
    x, out = torch.zeros(0), _empty(0)
    dist.all_reduce(x)
    dist.all_gather(out, x)
    return x, out


FEATURES = [
    *(
        Feature(f"{name}{suffix}", run, alone)
        for name, (program, alone) in COLLECTIVES.items()
        for suffix, run in (("", program), (", async_op", partial(program, async_op=True)))
    ),
    Feature(
        "all_to_all_single, empty parts",
        collectives.all_to_all_with_empty_parts,
        lambda: [[("torch.float32", [0.0, 10.0, 20.0, 30.0] if rank == 2 else [])] for rank in RANKS],
    ),
    *(
        Feature(f"coalescing manager, {name}{suffix}", partial(coalescing_manager, post, **how), alone)
        for name, (post, alone) in COALESCED.items()
        for suffix, how in (("", {}), (", async_ops", {"async_ops": True}))
    ),
    *(
        Feature(f"all_reduce_coalesced{suffix}", partial(all_reduce_coalesced, **how), lambda: everywhere(_sums()))
        for suffix, how in (("", {}), (", async_op", {"async_op": True}))
    ),
    Feature(
        "all_gather_coalesced",
        collectives.all_gather_coalesced,
        lambda: everywhere([[("torch.float32", [10.0 * r + i for i in range(n)]) for n in (1, 2)] for r in RANKS]),
    ),
    Feature(
        "works waited for in reverse",
        works_waited_for_in_reverse,
        lambda: everywhere([sum(of_all(n)) for n in (1, 2, 3)]),
    ),
    Feature("chain of futures", chain_of_futures, lambda: everywhere(2 * sum(of_all(3)) + 1)),
    Feature("futures collected", futures_collected, lambda: everywhere([sum(of_all(n)) for n in (1, 2)])),
    Feature("polled until complete", polled_until_complete, lambda: everywhere(sum(of_all(3)))),
    Feature("all_gather of 9 dtypes", collectives.all_gather_of_every_dtype, _gathered_dtypes),
    Feature("broadcast of 9 dtypes", collectives.broadcast_of_every_dtype, _sent_dtypes),
    Feature("all_reduce of a scalar", scalars, lambda: everywhere(sum(of_all()))),
    Feature("collectives of empty tensors", empty_tensors, lambda: everywhere((torch.zeros(0), _empty(0)))),
]
