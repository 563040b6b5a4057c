"""PageRank over ranks: a round measured on gloo, and predicted for this machine and for a cluster by the virtual clock.

Usage: python benchmarks/comparisons/predicted_pagerank.py [--nodes 131072] [--edges 2097152] [--measure 1 2 4]
           [--predict 8 16 32 64 128 256] [--cluster 10 12.5]

There are two graphs of the same size. The edges of ``uni`` join any two nodes, so nearly every rank needs nearly every
score. The edges of ``near`` span at most a thousandth of the ids, as links within a site do. Simulated ranks do the
real work, one at a time. The duration of each call (best of three, in CPU time) is their computation on the virtual
clock. The link of this machine is fitted to a ping-pong, and ranks beyond its cores compute that much longer. A rank of
the cluster has its own core and its own link (latency in us, GB/s). The clock ignores other programs. It has one
algorithm for each collective: pairwise exchange for the halo, a ring for the three numbers.

A round is the time of one more iteration on the slowest rank, in the best repetition and in the median one. The ratio
is the best one over the prediction. ``sent`` is the counted number of bytes that all ranks send in the all_to_all of a
round. It must equal the cut: 8 bytes for each distinct source that a rank reads from another rank. ``computing`` is the
slowest rank's part.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.clock import Link, Topology, compute
from pdlcheck.primitives.arguments import members
from pdlcheck.primitives.pagerank.ranks.part import Part, make_part
from pdlcheck.primitives.pagerank.ranks.partition import partition_nodes
from pdlcheck.primitives.pagerank.ranks.solve import iterate
from pdlcheck.worlds import get_world

CHUNKS = 256  # chunks of the edges; rank r holds the chunks r, r + world_size, ...
PING_BYTES = (8, 1 << 20)
NO_VECTORS = {"personalization": None, "dangling": None, "start": None}
FEW, MANY = 2, 12  # numbers of rounds
costs: dict[tuple[str, int, int, str], float] = {}  # shared by simulated ranks: each call is measured once


class TimedPart(Part):
    """A part whose work is also added to the virtual clock."""

    slower = 1.0
    graph = ""

    def sending(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return self._timed("sending", super().sending, scores)

    def add_local(self, values: Tensor) -> Tensor:
        return self._timed("add_local", super().add_local, values)

    def add_remote(self, values: Tensor, sums: Tensor) -> None:
        self._timed("add_remote", super().add_remote, values, sums)

    def update(self, *given: Any) -> Tensor:
        return self._timed("update", super().update, *given)

    def _timed(self, name: str, function: Any, *given: Any) -> Any:
        key = (self.graph, self.who.world_size, self.who.rank, name)
        if key not in costs:
            costs[key] = min(seconds_of(function, given) for _ in range(3))
        compute(costs[key] * self.slower)
        return function(*given)


def seconds_of(function: Any, given: tuple[Any, ...]) -> float:
    copies = [one.clone() if isinstance(one, Tensor) else one for one in given]
    start = time.thread_time()  # CPU time, without that of other programs
    function(*copies)
    return time.thread_time() - start


def part_of(graph: str, num_nodes: int, num_edges: int) -> Part:
    """Return this rank's part; the graph is the same for any number of ranks."""
    who = members("predicted_pagerank", None)
    src, dst = [], []
    for chunk in range(who.rank, CHUNKS, who.world_size):
        draws, count = np.random.default_rng([7, chunk]), num_edges // CHUNKS
        src.append(draws.integers(0, num_nodes, count))
        if graph == "uni":
            dst.append(draws.integers(0, num_nodes, count))
        else:
            span = max(1, num_nodes // 1000)
            dst.append((src[-1] + draws.integers(-span, span + 1, count)) % num_nodes)
    into = np.concatenate(dst)
    return make_part(np.concatenate(src), into, None, partition_nodes(into, num_nodes, who), who)


def measured(graph: str, num_nodes: int, num_edges: int, repetitions: int) -> list[float]:
    """Return the seconds of a round on this rank, in each repetition."""
    part, taken = part_of(graph, num_nodes, num_edges), []
    for _ in range(repetitions):
        seconds = []
        for rounds in (FEW, MANY):
            dist.barrier()
            start = time.perf_counter()
            iterate(part, NO_VECTORS, damping=0.85, tol=1e-300, max_iter=rounds)
            seconds.append(time.perf_counter() - start)
        taken.append((seconds[1] - seconds[0]) / (MANY - FEW))
    return taken


def simulated(graph: str, num_nodes: int, num_edges: int, slower: float, rounds: int) -> int:
    """Run the rounds on a simulated rank; return the number of nodes of other ranks that it reads."""
    part = TimedPart(**vars(part_of(graph, num_nodes, num_edges)))
    vars(part).update(slower=slower, graph=graph)
    iterate(part, NO_VECTORS, damping=0.85, tol=1e-300, max_iter=rounds)
    return part.halo.num_nodes


def predicted(graph: str, size: tuple[int, int], world_size: int, link: Link, slower: float) -> tuple[float, int]:
    """Return the virtual seconds of a round, and the bytes that all ranks send in its all_to_all."""
    world, seconds, sent, cut = get_world("sim", topology=Topology(intra=link)), [], [], 0
    for rounds in (FEW, FEW + 1):
        halo = world.run(simulated, graph, *size, slower, rounds, world_size=world_size)
        seconds.append(world.timeline.step_time_s)
        sent.append(world.traffic.sent_bytes(op="all_to_all"))
        cut = 8 * sum(halo)
    if sent[1] - sent[0] != cut:
        raise SystemExit(f"{graph}, {world_size} ranks: {sent[1] - sent[0]} bytes a round, the cut is {cut}")
    return seconds[1] - seconds[0], cut


def ping_pong(nbytes: int, rounds: int) -> float:
    """Return the seconds of one message between ranks 0 and 1, in the best round."""
    tensor, other, taken = torch.zeros(nbytes, dtype=torch.uint8), 1 - dist.get_rank(), []
    for _ in range(rounds):
        start = time.perf_counter()
        for sends in (dist.get_rank() == 0, dist.get_rank() == 1):
            dist.send(tensor, other) if sends else dist.recv(tensor, other)
        taken.append((time.perf_counter() - start) / 2)
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1 << 17)
    parser.add_argument("--edges", type=int, default=1 << 21)
    parser.add_argument("--graphs", nargs="+", default=["uni", "near"], choices=["uni", "near"])
    parser.add_argument("--measure", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--predict", type=int, nargs="*", default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--cluster", type=float, nargs=2, default=[10.0, 12.5], metavar=("US", "GBPS"))
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    size, cores = (options.nodes, options.edges), os.cpu_count() or 1
    cluster = Link(options.cluster[0] * 1e-6, options.cluster[1])
    gloo = get_world("gloo", watch=False)
    short_s, long_s = (gloo.run(ping_pong, nbytes, 30, world_size=2)[0] for nbytes in PING_BYTES)
    here = Link(short_s, (PING_BYTES[1] - PING_BYTES[0]) / (long_s - short_s) / 1e9)
    print(f"{size[0]} nodes, {size[1]} edges, {cores} cores, load {os.getloadavg()[0]:.1f}")
    print(f"links: here {here.latency_s * 1e6:.0f} us, {here.bandwidth_GBps:.2f} GB/s (fitted); ", end="")
    print(f"cluster {cluster.latency_s * 1e6:.0f} us, {cluster.bandwidth_GBps:.2f} GB/s")
    head = "graph  ranks  sent kB  gloo best  median ms  predicted ms  ratio  computing ms  cluster ms  speed-up  load"
    print(head, flush=True)
    for graph in options.graphs:
        alone = None
        for world_size in sorted({*options.measure, *options.predict}):
            on_cluster, sent = predicted(graph, size, world_size, cluster, 1.0)
            alone = alone or on_cluster
            cells = [""] * 4
            if world_size in options.measure:
                ranks = gloo.run(partial(measured, graph, *size, options.repetitions), world_size=world_size)
                taken = [max(one) * 1e3 for one in zip(*ranks, strict=True)]
                expected = predicted(graph, size, world_size, here, max(1.0, world_size / cores))[0] * 1e3
                shown = min(taken), statistics.median(taken), expected, min(taken) / expected
                cells = [f"{value:.2f}" for value in shown]
            work = [0.0] * world_size
            for (name, ranks_then, rank, _), seconds in costs.items():
                if (name, ranks_then) == (graph, world_size):
                    work[rank] += seconds * 1e3
            print(
                f"{graph:5}  {world_size:5}  {sent / 1e3:7.0f}  {cells[0]:>9}  {cells[1]:>9}  {cells[2]:>12}  "
                f"{cells[3]:>5}  {max(work):12.2f}  {on_cluster * 1e3:10.2f}  {alone / on_cluster:8.1f}  "
                f"{os.getloadavg()[0]:4.1f}",
                flush=True,
            )
    gloo.close()


if __name__ == "__main__":
    main()
