"""Programs for four ranks that a hand-written backend could get wrong; simulated ranks give the expected results.

Run as a module under mpiexec, it calls every program on the MPI backend and writes the results of each rank.
"""

from __future__ import annotations

import pickle
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..every_world.programs import EXPECTED, train_ddp

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
OPS = ("SUM", "PRODUCT", "MAX", "MIN")
BITS = ("BAND", "BOR", "BXOR")
MOVED = (*FLOATS, *WHOLE, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn)
KINDS = (
    *((dtype, op) for dtype in FLOATS for op in (*OPS, "AVG")),
    *((dtype, op) for dtype in (*WHOLE, torch.bool) for op in (*OPS, *BITS)),
    *((dtype, op) for dtype in (torch.complex64, torch.complex128) for op in ("SUM", "AVG")),
)


def _values(*shape, dtype=torch.float32):
    """Return small integers that differ from rank to rank, so that every order of addition is exact."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0, 3, shape, generator=generator).to(dtype)


def _reduce_op(name):
    return getattr(dist.ReduceOp, name)


def all_reduce_of_every_kind():
    results = []
    for dtype, op in KINDS:
        x = _values(5, dtype=dtype)
        dist.all_reduce(x, op=_reduce_op(op))
        results.append((str(dtype), op, x.tolist()))
    return results


def reduce_of_every_kind():
    results = []
    for dtype, op in KINDS:
        x = _values(5, dtype=dtype)
        dist.reduce(x, 2, op=_reduce_op(op))
        if dist.get_rank() == 2:
            results.append((str(dtype), op, x.tolist()))
    return results


def reduce_scatter_of_every_kind():
    results = []
    for dtype, op in KINDS:
        x, y = _values(8, dtype=dtype), torch.zeros(2, dtype=dtype)
        dist.reduce_scatter(y, list(x.split(2)), op=_reduce_op(op))
        results.append((str(dtype), op, y.tolist()))
    return results


def a_reduction_keeps_the_inputs_of_others():
    x = _values(3)
    before = x.clone()
    dist.reduce(x, 1)
    return dist.get_rank() == 1 or torch.equal(x, before)


def premultiplied_sum():
    x = _values(3)
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
    return x.tolist()


def every_dtype_moves():
    rank, world_size, results = dist.get_rank(), dist.get_world_size(), []
    for dtype in MOVED:
        x = _values(3, dtype=dtype)
        dist.broadcast(x, 3)
        gathered = [torch.zeros(2, dtype=dtype) for _ in range(world_size)]
        dist.all_gather(gathered, _values(2, dtype=dtype))
        turned = torch.zeros(4, dtype=dtype)
        dist.all_to_all_single(turned, _values(4, dtype=dtype))
        message = torch.zeros(2, dtype=dtype)
        sending = dist.isend(_values(2, dtype=dtype), (rank + 1) % world_size)
        dist.recv(message, (rank - 1) % world_size)
        sending.wait()
        results.append((str(dtype), [t.to(torch.complex64).tolist() for t in (x, *gathered, turned, message)]))
    return results


def strided_tensors():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    a, b, c = _values(3, 2).t(), _values(4, 4).t(), _values(3, 2, 4).transpose(0, 2)
    dist.all_reduce(a)
    dist.broadcast(b[:, 1:], 1)
    dist.reduce(c, 0)
    columns = torch.zeros(3, world_size)
    dist.all_gather(list(columns.unbind(1)), _values(3, 2)[:, 0])
    piece = torch.zeros(2, 3).t()
    dist.scatter(piece, [_values(2, 3).t() + other for other in range(world_size)] if rank == 3 else None, src=3)
    return [a.tolist(), b.tolist(), c.tolist() if rank == 0 else None, columns.tolist(), piece.tolist()]


def broadcast_of_a_column():
    dist.broadcast(_values(4, 4)[:, 1], 1)


def strided_messages():
    """Exchange strided tensors; MPI moves them if no other rank compares the messages, gloo does not."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sent, taken = _values(4, 4), _values(4, 2)
    sending = dist.isend(sent[:, 3], (rank + 1) % world_size)
    dist.recv(taken[:, 0], (rank - 1) % world_size)
    sending.wait()
    return sent[:, 3].tolist(), taken[:, 0].tolist()


def empty_tensors_and_scalars():
    nothing, scalar = torch.zeros(0, 3), torch.tensor(float(dist.get_rank()))
    dist.all_reduce(nothing)
    dist.all_reduce(scalar)
    gathered = [torch.zeros(()) for _ in range(4)]
    dist.all_gather(gathered, scalar + dist.get_rank())
    out = torch.zeros(6)
    counts = [0, 1, 2, 3]
    dist.all_to_all_single(out, _values(4 * dist.get_rank()), counts, [dist.get_rank()] * 4)
    return tuple(nothing.shape), scalar.item(), [x.item() for x in gathered], out.tolist()


def all_to_all_of_lists():
    rank = dist.get_rank()
    inputs = [torch.full((rank + other,), float(10 * rank + other)) for other in range(4)]
    outputs = [torch.zeros(rank + other) for other in range(4)]
    dist.all_to_all(outputs, inputs)
    return [x.tolist() for x in outputs]


def all_gather_into_its_own_input():
    out = torch.zeros(8)
    mine = out[2 * dist.get_rank() : 2 * dist.get_rank() + 2]
    mine.fill_(dist.get_rank() + 1.0)
    dist.all_gather_into_tensor(out, mine)
    return out.tolist()


def coalesced_of_every_kind():
    xs, ys = [_values(2), _values(3)], [torch.zeros(8), torch.zeros(12)]
    with dist._coalescing_manager():
        for x, y in zip(xs, ys, strict=True):
            dist.all_gather_into_tensor(y, x)
    totals = [torch.zeros(2), torch.zeros(3)]
    with dist._coalescing_manager():
        for x, y in zip(totals, ys, strict=True):
            dist.reduce_scatter_tensor(x, y)
    return [x.tolist() for x in (*ys, *totals)]


def groups_that_overlap():
    rank, results = dist.get_rank(), []
    for members in ([1, 3], [1, 2, 3], [0, 2], [0, 1, 2, 3], [2]):
        group = dist.new_group(members)
        if rank not in members:
            continue
        x = torch.tensor([2.0**rank])
        dist.all_reduce(x, group=group)
        root = torch.tensor([float(rank)])
        dist.broadcast(root, members[-1], group=group)
        everybody = [None] * len(members)
        dist.all_gather_object(everybody, rank, group=group)
        if len(members) > 1 and rank == members[0]:
            dist.send(x + 1, members[-1], group=group, tag=7)
        elif len(members) > 1 and rank == members[-1]:
            results.append(dist.recv(x, group=group, tag=7))
        results.append((x.item(), root.item(), everybody))
        if members != [1, 3]:
            dist.destroy_process_group(group)
    return results


def groups_by_their_members_alone():
    if dist.get_rank() in (0, 3):
        group = dist.new_group([0, 3], use_local_synchronization=True)
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x, group=group)
        return x.item()
    return None


def waits_in_another_order():
    xs = [_values(100) for _ in range(6)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    for work in reversed(works):
        work.wait()
    return [x.sum().item() for x in xs], all(work.is_completed() for work in works)


def polls_instead_of_waiting():
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)
    until = time.monotonic() + 30
    while not work.is_completed() and time.monotonic() < until:
        pass
    return x.tolist()


def a_chain_of_futures():
    x = torch.ones(2)
    future = dist.all_reduce(x, async_op=True).get_future()
    return future.then(lambda done: done.value()[0] * 2).then(lambda done: (done.value() + 1).tolist()).wait()


def train_with_no_sync_and_uneven_inputs():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for step in range(2 + dist.get_rank()):
            if step == 0:
                with ddp.no_sync():
                    ddp(_values(4, 3)).square().mean().backward()
            ddp(_values(4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.tolist() for p in model.parameters()]


def refusals():
    """Call meaningless operations, which are refused before any message; then use the group."""
    tries = {
        "AVG of integers": lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), op=dist.ReduceOp.AVG),
        "BOR of floats": lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BOR),
        "two dtypes": lambda: dist.all_gather_into_tensor(torch.zeros(4, dtype=torch.int32), torch.ones(1)),
        "two shapes": lambda: dist.all_gather([torch.zeros(3) for _ in range(4)], torch.ones(2)),
        "a sparse tensor": lambda: dist.all_reduce(torch.ones(2).to_sparse()),
    }
    said = {}
    for name, attempt in tries.items():
        try:
            attempt()
        except (ValueError, RuntimeError) as error:
            said[name] = str(error)
    x = torch.ones(1)
    dist.all_reduce(x)
    return said, x.item()


def moves_while_nobody_waits():
    """Send a long message while the sender waits for the store; rank 1 confirms the message through the store."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    x = torch.full((1 << 20,), 3.0)
    if rank == 0:
        work = dist.isend(x, 1)
        store.wait(["the message is there"])
        work.wait()
    elif rank == 1:
        x.zero_()
        dist.recv(x, 0)
        store.set("the message is there", "")
    return x.sum().item()


def reduces_while_every_rank_computes():
    """Return a sum that no rank waits for; rank 0 has begun and computed before another rank begins."""
    x, matrix = torch.ones(1 << 20), torch.rand(200, 200)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() > 0:
        store.wait(["rank 0 computes"], timedelta(seconds=60))
    future = dist.all_reduce(x, async_op=True).get_future()
    until = time.monotonic() + 60
    while not future.done() and time.monotonic() < until:
        matrix = (matrix @ matrix).softmax(0)
        if dist.get_rank() == 0:
            store.set("rank 0 computes", "")
    assert future.done(), "nothing moved while all ranks computed"
    return x.sum().item()


AS_SIMULATED = (
    a_chain_of_futures,
    all_gather_into_its_own_input,
    all_reduce_of_every_kind,
    all_to_all_of_lists,
    coalesced_of_every_kind,
    empty_tensors_and_scalars,
    every_dtype_moves,
    groups_by_their_members_alone,
    groups_that_overlap,
    polls_instead_of_waiting,
    premultiplied_sum,
    reduce_of_every_kind,
    reduce_scatter_of_every_kind,
    strided_tensors,
    waits_in_another_order,
)
REAL_ONLY = (
    a_reduction_keeps_the_inputs_of_others,
    broadcast_of_a_column,
    moves_while_nobody_waits,
    reduces_while_every_rank_computes,
    refusals,
    strided_messages,
    train_with_no_sync_and_uneven_inputs,
)


def _call(program):
    try:
        return program()
    except Exception as error:  # the test shows the error beside the expected result
        return f"{type(error).__name__}: {error}"


def main(folder: Path) -> None:
    """Call every program; write the results to ``folder``/rank."""
    import pdlcheck.worlds.mpi  # noqa: F401 - registers the backend

    warnings.simplefilter("ignore")  # torch warns of names that it renames from release to release
    dist.init_process_group("pdlcheck_mpi")
    programs = [*(program for program, _ in EXPECTED), train_ddp, *AS_SIMULATED, *REAL_ONLY]
    results = {program.__name__: _call(program) for program in programs}
    (folder / str(dist.get_rank())).write_bytes(pickle.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
