"""The function-fitting network as a pipeline: one stage on each rank, trained with micro-batches.

    torchrun --nproc-per-node 2 examples/pipeline.py
    torchrun --nproc-per-node 2 examples/pipeline.py --schedule interleaved
    torchrun --nproc-per-node 2 examples/pipeline.py --schedule pipedream --microbatches 12

Prints the grid of the schedule, the layers of each rank, and the loss.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.primitives import Pipeline, function_samples

BATCH = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1f1b", choices=["gpipe", "1f1b", "interleaved", "pipedream"])
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1

    torch.manual_seed(0)  # every rank makes the whole model and keeps its own stages
    widths = [1, 80, 80, 40, 1]
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    model = nn.Sequential(*(m for layer in layers for m in (layer, nn.ReLU())))[:-1]
    adam = partial(torch.optim.Adam, lr=0.01)
    asynchronous = options.schedule == "pipedream"
    pipeline = Pipeline(
        model,
        nn.MSELoss(),
        schedule=options.schedule,
        n_microbatches=options.microbatches,
        # PipeDream's stages take a step after each backward pass
        optimizer=adam if asynchronous else None,
    )
    optimizer = None if asynchronous else adam(pipeline.module.parameters())
    if rank == 0:
        print(pipeline.schedule)
        for stage, names in enumerate(pipeline.stages):
            print(f"stage {stage}: layers {', '.join(names)}, rank {pipeline.schedule.stage_ranks[stage]}")

    x, y = function_samples(600)
    generator = torch.Generator().manual_seed(0)
    for epoch in range(1, options.epochs + 1):
        losses = []
        for chosen in torch.randperm(len(x), generator=generator).split(BATCH):
            pipeline.module.zero_grad()
            # only rank 0 reads inputs; only the last rank reads targets and returns the loss
            result = pipeline.step(x[chosen] if rank == 0 else None, y[chosen] if rank == last else None)
            if optimizer:
                optimizer.step()
            if result.loss is not None:
                losses.append(result.loss.item())
        if losses and epoch % 5 == 0:
            print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
