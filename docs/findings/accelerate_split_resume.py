"""accelerate 1.15.0: a dispatched, stateful loader with split_batches resumes world_size - 1 batches too early.

torchrun --nproc-per-node 2 accelerate_split_resume.py    # plain gloo
python accelerate_split_resume.py                         # check_resume on the simulated cluster: fails
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader

from pdlcheck.checks import check_resume
from pdlcheck.worlds import get_world


def start(split_batches=True):
    """Return a training whose checkpoint has the state of rank 0's loader, as it is the only rank that reads."""
    config = DataLoaderConfiguration(split_batches=split_batches, dispatch_batches=True, use_stateful_dataloader=True)
    accelerator, model, batches = Accelerator(cpu=True, dataloader_config=config), nn.Linear(1, 1), []
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    batch_size = 2 * dist.get_world_size() if split_batches else 2
    loader = accelerator.prepare(DataLoader(torch.arange(48.0)[:, None], batch_size=batch_size))

    def step(_):
        if not batches:
            batches.append(iter(loader))
        samples = next(batches[0])
        model.zero_grad()
        (model(samples) - samples.cos()).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= 1e-4 * parameter.grad
        return samples.flatten().tolist()

    def save(path):
        if dist.get_rank() == 0:
            torch.save((model.state_dict(), loader.state_dict()), path)
        dist.barrier()

    def load(path):
        weights, position = torch.load(path, weights_only=False)
        model.load_state_dict(weights)
        loader.load_state_dict(position)
        batches.clear()

    return model, step, save, load


def check(begin=start):
    """Compare a training that is resumed after four steps with one that does not stop."""
    check_resume(begin, get_world("sim"), saved_after=4, steps=6)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        check()
    dist.init_process_group("gloo")
    path = [tempfile.mkdtemp()]
    dist.broadcast_object_list(path)
    (_, step, save, _), (_, resumed_step, _, load) = start(), start()
    used = [step(i) for i in range(4)]
    save(Path(path[0]) / "checkpoint")
    load(Path(path[0]) / "checkpoint")
    print(f"rank {dist.get_rank()}: {used}, without a stop {step(4)}, resumed {resumed_step(4)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
