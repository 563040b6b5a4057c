"""Training that resumes from its last checkpoint when a worker is killed, and ends with the same weights.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 9 examples/elastic.py --folder checkpoints --pause 0.2

While it trains, run kill -9 in another terminal with one of the process ids that it prints. To use several machines of
which some may fail, start it on each with --nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT in place of
--standalone. A batch is then split over the remaining workers.

Without the variable, restarted workers use the store of the workers before them. There they may find addresses of
processes that have ended, and wait for them: https://github.com/pytorch/pytorch/issues/135712.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.primitives import (
    broadcast_parameters,
    function_samples,
    resumable_steps,
    shard_digest,
    shard_indices,
    sync_gradients,
)

SAMPLES, BATCH = 60, 12


def train(folder: str, steps: int, save_every: int, pause: float) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    inputs, targets = function_samples(SAMPLES)
    model = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Dropout(0.1), nn.Linear(40, 1))
    broadcast_parameters(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for step in resumable_steps(folder, steps=steps, save_every=save_every, **parts):
        epoch, batch = divmod(step, SAMPLES // BATCH)  # the step determines the position in the data
        order = shard_indices(SAMPLES, rank=0, world_size=1, epoch=epoch)
        mine = order.split(BATCH)[batch].tensor_split(world_size)[rank]
        optimizer.zero_grad()
        (model(inputs[mine]) - targets[mine]).square().mean().backward()
        sync_gradients(model, weight=len(mine))
        optimizer.step()
        scheduler.step()
        weights = shard_digest(model.state_dict().values())[:16]
        say(f"step {step} on rank {rank} of {world_size}: samples {mine.tolist()}, weights {weights}")
        time.sleep(pause)
    say(f"trained on rank {rank} of {world_size}: {shard_digest(model.state_dict().values())}")


def say(line: str) -> None:
    """Print the line in one write: the ranks share a terminal, and torchrun starts them unbuffered."""
    print(f"{line}\n", end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="where the checkpoints are")
    parser.add_argument("--steps", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--save-every", type=int, default=4, metavar="STEPS", help="default: %(default)s")
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="after each step")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    say(f"rank {dist.get_rank()} of {dist.get_world_size()} is process {os.getpid()}")
    train(options.folder, options.steps, options.save_every, options.pause)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
