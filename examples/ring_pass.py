"""A tensor goes around the ring 0 -> 1 -> 2 -> ... -> 0, and every rank adds 1 to it.

torchrun --nproc-per-node 4 examples/ring_pass.py
mpiexec -n 4 python examples/ring_pass.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from joining import process_group, say

from pdlcheck.primitives import ring_pass


def main() -> None:
    with process_group():
        tensor = ring_pass(torch.zeros(1))
        everyone = [torch.empty(1) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, tensor)
        for rank, held in enumerate(everyone):
            say(f"rank {rank} holds {held.item():g}{', home again' if rank == 0 else ''}")


if __name__ == "__main__":
    main()
