"""torch 2.13.0: the backward pass of torch.distributed.nn.functional.all_gather raises in most groups on gloo.

torchrun --nproc-per-node 4 all_gather_backward.py    # plain gloo
python all_gather_backward.py                         # on the simulated cluster: raises, with the line
"""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist
from torch.distributed.nn import functional

from pdlcheck.worlds import get_world


def gradient(in_pairs=True):
    """Return the gradient of the sum of all that is gathered: the number of ranks in the group."""
    warnings.simplefilter("ignore")  # torch renames its functions from release to release
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[dist.get_rank() // 2] if in_pairs else None
    x = torch.ones(2, requires_grad=True)
    torch.stack(functional.all_gather(x, group=group)).sum().backward()
    return x.grad.tolist()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        get_world("sim").run(gradient, world_size=4)
    dist.init_process_group("gloo")
    try:
        print(f"rank {dist.get_rank()}: {gradient()}", flush=True)
    except ValueError as error:
        print(f"rank {dist.get_rank()}: ValueError: {error}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
