"""Compare the virtual clock with real processes: a pipeline whose stages sleep, on gloo and as predicted.

Usage: python benchmarks/comparisons/predicted_pipeline.py [--ranks 2 3 4] [--rounds 10]

The link of the prediction is fitted to a ping-pong over the same gloo processes, at two message sizes. A row gives the
milliseconds of a step, measured and predicted, and the ratio of the two. The measured step is the slowest rank's, in
the best round and in the median one. The model ignores that ranks and other programs share cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from pdlcheck.clock import Link, Topology
from pdlcheck.worlds import get_world

sys.path.insert(0, str(Path(__file__).parents[2]))

from suites.meta.simulated.timed_programs import gpipe

SIZES = (4, 4 << 20)  # bytes of the ping-pong
STAGE_S = 5e-3


def ping_pong(nbytes: int, rounds: int) -> float:
    """Return the seconds of one message between ranks 0 and 1, in the best round."""
    tensor, rank, taken = torch.zeros(nbytes // 4), dist.get_rank(), []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)
        taken.append((time.perf_counter() - start) / 2)
    return min(taken)


def timed_gpipe(n_microbatches: int, seconds: float, nbytes: int, rounds: int) -> list[float]:
    """Return the seconds of each round on this rank."""
    taken = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        gpipe(n_microbatches, seconds, nbytes)
        taken.append(time.perf_counter() - start)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    gloo = get_world("gloo", watch=False)
    head = "ranks  microbatches  message B  latency us  GB/s  best ms  median ms"
    print(f"{head}  predicted ms  best ratio  median ratio")
    for world_size in options.ranks:
        short_s, long_s = (gloo.run(ping_pong, size, 30, world_size=world_size)[0] for size in SIZES)
        link = Link(short_s, (SIZES[1] - SIZES[0]) / (long_s - short_s) / 1e9)
        for n_microbatches, nbytes in ((4, 4), (8, 4), (8, 4 << 20)):
            ranks = gloo.run(timed_gpipe, n_microbatches, STAGE_S, nbytes, options.rounds, world_size=world_size)
            slowest = [max(one) for one in zip(*ranks, strict=True)]
            best_s, median_s = min(slowest), statistics.median(slowest)
            sim = get_world("sim", topology=Topology(intra=link))
            sim.run(gpipe, n_microbatches, STAGE_S, nbytes, world_size=world_size)
            predicted_s = sim.timeline.step_time_s
            print(
                f"{world_size:5}  {n_microbatches:12}  {nbytes:9}  {link.latency_s * 1e6:10.0f}  "
                f"{link.bandwidth_GBps:4.2f}  {best_s * 1e3:7.2f}  {median_s * 1e3:9.2f}  {predicted_s * 1e3:12.2f}  "
                f"{best_s / predicted_s:10.3f}  {median_s / predicted_s:12.3f}",
                flush=True,
            )
    gloo.close()


if __name__ == "__main__":
    main()
