"""Each half of the ranks is divided into pairs: show whether a sum over a pair reaches the right ranks.

torchrun --nproc-per-node 8 subgroups_of_a_group.py         # new_subgroups(group=half): it does not
torchrun --nproc-per-node 8 subgroups_of_a_group.py --all   # every rank makes the pairs of both halves
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist


def sum_over_pair(all_make_all=False):
    """Return the sum of the ranks in this rank's pair."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if all_make_all:
        pair, _ = dist.new_subgroups(group_size=2)
    else:
        half, _ = dist.new_subgroups(group_size=size // 2)
        pair, _ = dist.new_subgroups(group_size=2, group=half)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=pair)
    return total.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every rank makes all pairs")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: {sum_over_pair(options.all):g}", flush=True)
    dist.destroy_process_group()
