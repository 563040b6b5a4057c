"""The run of pipeline.svg: GPipe's forward and backward passes on two hosts with two devices each.

Usage: python docs/pictures/pipeline.py; the program is written out for readers who come from the README's picture
"""

from pathlib import Path

import torch
import torch.distributed as dist

from pdlcheck.clock import Link, Topology, compute
from pdlcheck.worlds import get_world


def pipeline(stage_s, n_microbatches):
    """Run one stage on each rank; a backward pass takes twice as long as a forward pass."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for source, target, seconds in ((rank - 1, rank + 1, stage_s), (rank + 1, rank - 1, 2 * stage_s)):
        for _ in range(n_microbatches):
            x = torch.zeros(250_000)
            if 0 <= source <= last:
                dist.recv(x, source)
            compute(seconds)
            if 0 <= target <= last:
                dist.send(x, target)


if __name__ == "__main__":
    world = get_world("sim", topology=Topology(devices=2, intra=Link(2e-6, 100), inter=Link(10e-6, 10)))
    world.run(pipeline, 1e-3, 4, world_size=4)
    print(f"{world.timeline.step_time_s * 1e3:.2f} ms, bubble {world.timeline.bubble:.1%}")
    print(world.traffic)
    print(world.timeline.save(Path(__file__).with_suffix(".svg")))
