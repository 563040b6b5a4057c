"""PowerSGD with two buckets on gloo: ranks issue their all_reduces in different orders.

torchrun --nproc-per-node 2 powersgd_order.py          # torch's hook: hangs, or ends with replicas apart
torchrun --nproc-per-node 2 powersgd_order.py --wait   # the same hook, waited for bucket by bucket: ends well
"""

from __future__ import annotations

import argparse
import os
import threading
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, STEPS = 8, 2, 6


def torchs_hook(state, bucket):
    return power_sgd.powerSGD_hook(state, bucket)


def waited_hook(state, bucket):
    """Run torch's hook and wait for it, so that callbacks of two buckets cannot interleave."""
    future = power_sgd.powerSGD_hook(state, bucket)
    future.wait()
    return future


def train(hook, order=None):
    """Return the weights after a few steps; append the number of elements of each all_reduce to ``order``."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20)  # one bucket for each layer
    state = power_sgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)

    def recording(state, bucket):
        if order is not None:
            order.append("|")
        return hook(state, bucket)

    ddp.register_comm_hook(state, recording)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    all_reduce = dist.all_reduce

    def noted(tensor, *args, **kwargs):
        order.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    if order is not None:
        dist.all_reduce = noted
    try:
        for _ in range(STEPS):
            optimizer.zero_grad()
            ddp(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
    finally:
        dist.all_reduce = all_reduce
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--wait", action="store_true")
    dist.init_process_group("gloo")
    order = []

    def give_up():
        print(f"rank {dist.get_rank()} hangs after {order}", flush=True)
        os._exit(1)

    watchdog = threading.Timer(10.0, give_up)
    watchdog.daemon = True
    watchdog.start()
    weights = train(waited_hook if parser.parse_args().wait else torchs_hook, order)
    others = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(others, weights)
    print(f"rank {dist.get_rank()} ends, {max((w - weights).abs().max().item() for w in others):.2g} apart, {order}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
