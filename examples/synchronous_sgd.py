"""Synchronous SGD: LeNet learns scikit-learn's digits on any number of replicas, as it does in one process.

    python examples/synchronous_sgd.py
    mpiexec -n 4 python examples/synchronous_sgd.py
    torchrun --nproc-per-node 2 examples/synchronous_sgd.py

Every rank reads its part of each batch and computes gradients. The gradients are averaged, weighted by the numbers of
samples, and all ranks take the same step. The printed lines do not depend on the number of ranks.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from joining import process_group, say
from torch import nn

from pdlcheck.primitives import LeNet, broadcast_parameters, shard_indices, sync_gradients
from pdlcheck.primitives.digits import digits


def train(epochs: int, batch: int) -> nn.Module:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # different weights on every rank, until they are broadcast
    images, labels = digits(dtype=torch.float64)
    model = LeNet().double()
    broadcast_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        total = torch.zeros(1, dtype=torch.float64)
        order = shard_indices(len(images), rank=0, world_size=1, epoch=epoch)
        for samples in order.split(batch):
            mine = samples.tensor_split(world_size)[rank]
            optimizer.zero_grad()
            if len(mine):  # the last batch may have fewer samples than there are ranks
                loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
                loss.backward()
                total += loss.item() * len(mine)
            sync_gradients(model, weight=len(mine))
            optimizer.step()
        dist.all_reduce(total)
        say(f"epoch {epoch}: loss {total.item() / len(images):.6f}")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=50, help="samples of all ranks together; default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with process_group():
        model = train(options.epochs, options.batch)
        images, labels = digits(train=False, dtype=torch.float64)
        right = (model(images).argmax(1) == labels).double().mean().item()
        say(f"{right:.1%} of {len(labels)} digits that it has not seen are read right")


if __name__ == "__main__":
    main()
