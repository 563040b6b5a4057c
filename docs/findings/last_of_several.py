"""Two all-gathers, and a wait for the second one only: count the reads that find the first result incomplete.

torchrun --nproc-per-node 2 last_of_several.py          # waits for the second: most often it is incomplete
torchrun --nproc-per-node 2 last_of_several.py --all    # waits for both
"""

from __future__ import annotations

import argparse
import warnings

import torch
import torch.distributed as dist

NUMEL, TIMES = 4_000_000, 20


def times_unfinished(wait_for_all=False, numel=NUMEL, times=TIMES):
    """Return how often the gathered tensor lacks the last rank's values when it is read."""
    warnings.simplefilter("ignore")  # torch renames its functions from release to release
    size, unfinished = dist.get_world_size(), 0
    for _ in range(times):
        large, small = torch.full((numel,), dist.get_rank() + 1.0), torch.ones(1)
        gathered, others = torch.zeros(size * numel), torch.zeros(size)
        works = [
            dist.all_gather_into_tensor(gathered, large, async_op=True),
            dist.all_gather_into_tensor(others, small, async_op=True),
        ]
        for work in works if wait_for_all else works[-1:]:
            work.wait()
        unfinished += gathered[-1].item() != size
        works[0].wait()
    return unfinished


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="wait for both")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: unfinished {times_unfinished(options.all)} of {TIMES} times", flush=True)
    dist.destroy_process_group()
