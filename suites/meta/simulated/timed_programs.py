"""Programs whose time on a cluster is known in closed form; their arithmetic is ``compute(seconds)``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pdlcheck.clock import compute


def gpipe(microbatches, seconds, nbytes=4):
    """Run all forwards, then all backwards, which take twice as long, with blocking messages of ``nbytes``."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x = torch.zeros(nbytes // 4)
    for _ in range(microbatches):
        if rank > 0:
            dist.recv(x, rank - 1)
        compute(seconds)
        if rank < last:
            dist.send(x, rank + 1)
    for _ in range(microbatches):
        if rank < last:
            dist.recv(x, rank + 1)
        compute(2 * seconds)
        if rank > 0:
            dist.send(x, rank - 1)


def one_f_one_b(microbatches, seconds):
    """Run some forwards to fill the pipeline, then forwards and backwards in turn, then the remaining backwards."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    x, sends = torch.zeros(1), []

    def forward():
        if rank > 0:
            dist.recv(x, rank - 1, tag=1)
        compute(seconds)
        if rank < stages - 1:
            sends.append(dist.isend(torch.zeros(1), rank + 1, tag=1))

    def backward():
        if rank < stages - 1:
            dist.recv(x, rank + 1, tag=2)
        compute(2 * seconds)
        if rank > 0:
            sends.append(dist.isend(torch.zeros(1), rank - 1, tag=2))

    warm_up = min(stages - 1 - rank, microbatches)
    for _ in range(warm_up):
        forward()
    for _ in range(microbatches - warm_up):
        forward()
        backward()
    for _ in range(warm_up):
        backward()
    for send in sends:
        send.wait()


def train_ddp_of_layers(layers, seconds, width=512):
    """Take two steps of torch's DDP; a layer's backward takes ``seconds``.

    DDP reduces all gradients at once in its first step. In the second step it reduces by layer: a weight is one bucket
    of 1 MiB.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])
    for layer in model:
        layer.register_full_backward_pre_hook(lambda *_: compute(seconds))
    replica = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    for _ in range(2):
        replica(torch.ones(1, width)).sum().backward()


def exchange(microseconds, sizes, calls):
    """Run the calls that ``test_clock`` draws: in each call compute, then post operations or wait for all so far."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pending, kept = [], []
    for number, (call, size, waits) in enumerate(zip(calls, sizes, microseconds, strict=True)):
        compute(waits[rank % len(waits)] * 1e-6)
        x = torch.zeros(size)
        kept.append(x)
        if call == "all_reduce":
            pending.append(dist.all_reduce(x, async_op=True))
        elif call == "shift":
            y = torch.zeros(size)
            kept.append(y)
            right, left = (rank + 1) % world_size, (rank - 1) % world_size
            both = [dist.P2POp(dist.isend, x, right, tag=number), dist.P2POp(dist.irecv, y, left, tag=number)]
            pending += dist.batch_isend_irecv(both)
        elif call == "to_rank_0":
            if rank:
                pending.append(dist.isend(x, 0, tag=number))
            else:
                for src in range(1, world_size):
                    y = torch.zeros(size)
                    kept.append(y)
                    pending.append(dist.irecv(y, src, tag=number))
        else:
            for work in pending:
                work.wait()
            pending.clear()
    for work in pending:
        work.wait()
