"""The experiment of the first document: four versions of PageRank on one random graph, beside the document's claims.

Usage: python benchmarks/comparisons/pagerank_experiment.py [--nodes 10000] [--rounds 200] [--limit 600]
       [--without "O(N^3)"]

The graph is the document's: a directed Erdos-Renyi graph with N = 10 000 and p = 0.05 (a mean degree of 500). The ring
i -> i + 1 is added so that every node has an out-edge. There are K = 200 rounds at d = 0.85. Each version runs in
float32 and float64, on the CPU and, if there is one, on CUDA. v1 runs in the document's COO layout and in CSR. v3 runs
with the document's O(N^3) product before the loop, and by scaling columns, which gives the same matrix.

"all" is the seconds of one call with K rounds, after a call that loads libraries and kernels. "a round" is
``(T(K) - T(1)) / (K - 1)`` in milliseconds. "before" is the rest: building the matrix and, in v3, folding it.
"error" is the L1 distance from the dense float64 solution of the linear system. The time of a version is estimated from
one round or from a small matrix product. Above --limit seconds the version does not run, and its row states why.

Source: D. Gannon, "Doing Deep Learning in Parallel with PyTorch" (2020). Its own figures stand in a picture that has
not been preserved; the claims of its text are printed beside the results of this run.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers.machine import this_machine
from peers.pagerank_claims import print_claims

from pdlcheck.primitives.pagerank import (
    Graph,
    document_graph,
    pagerank_reference,
    pagerank_v0,
    pagerank_v1,
    pagerank_v2,
    pagerank_v3,
)

HERE = Path(__file__).resolve().parent
DAMPING = 0.85
VERSIONS: dict[str, Callable[..., torch.Tensor]] = {
    "v0 messages": pagerank_v0,
    "v1 sparse, COO": functools.partial(pagerank_v1, layout="coo"),
    "v1 sparse, CSR": pagerank_v1,
    "v2 dense": pagerank_v2,
    "v3 folded, O(N^3)": functools.partial(pagerank_v3, fold="matmul"),
    "v3 folded, O(N^2)": pagerank_v3,
}
SAMPLE = 1024  # side of the small matrix product that the N x N product is estimated from


@dataclass
class Row:
    """One version on one device; seconds are None if it did not run, and ``why`` gives the reason."""

    version: str
    device: str
    dtype: str
    all_s: float | None = None
    round_s: float | None = None
    before_s: float | None = None
    error: float | None = None
    why: str = ""

    @property
    def loop_s(self) -> float | None:
        return None if self.all_s is None or self.before_s is None else max(self.all_s - self.before_s, 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000, help="N; default: %(default)s")
    parser.add_argument("--mean-degree", type=float, help="default: p = 0.05, that is (N - 1) / 20")
    parser.add_argument("--rounds", type=int, default=200, help="K; default: %(default)s")
    parser.add_argument("--limit", type=float, default=600, help="seconds a row may take; default: %(default)s")
    parser.add_argument("--without", default="", metavar="TEXT", help="leave out versions whose name contains this")
    parser.add_argument("--json", type=Path, help="save the rows here")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds must be 2 or more to time one of them, got {options.rounds}")
    degree = (options.nodes - 1) * 0.05 if options.mean_degree is None else options.mean_degree
    graph = document_graph(options.nodes, mean_degree=degree)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    load = os.getloadavg()[0]
    began = time.perf_counter()
    exact = pagerank_reference(graph, damping=DAMPING)
    solved_s, p = time.perf_counter() - began, degree / (options.nodes - 1)
    print(f"N = {options.nodes}, {graph.num_edges} edges (p = {p:.3g} and the ring), ", end="")
    print(f"K = {options.rounds}, d = {DAMPING}")
    cores, threads = os.cpu_count(), torch.get_num_threads()
    gpu = torch.cuda.get_device_name() if len(devices) > 1 else "no CUDA device"
    print(f"{cores} cores, {threads} threads, {gpu}, torch {torch.__version__}, load {load:.1f}")
    print(f"exact solution, dense and direct, in {solved_s:.1f} s")
    print(f"\n{'version':18}{'device':>7}{'dtype':>9}{'all, s':>10}{'before, s':>11}{'a round, ms':>13}{'error':>10}")
    rows = []
    for device in devices:
        for dtype in (torch.float32, torch.float64):
            for name in VERSIONS:
                if options.without and options.without in name:
                    continue
                rows.append(measured(name, graph, device, dtype, options.rounds, options.limit, exact))
                print_row(rows[-1])
    print_claims([row for row in rows if row.all_s is not None])
    print(f"\nload before {load:.1f}, after {os.getloadavg()[0]:.1f}")
    if options.json:
        record = {"machine": this_machine(), "load_before": load, "num_nodes": graph.num_nodes}
        record |= {"num_edges": graph.num_edges, "rounds": options.rounds, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def measured(
    name: str, graph: Graph, device: str, dtype: torch.dtype, rounds: int, limit: float, exact: np.ndarray
) -> Row:
    row = Row(name, device, str(dtype).removeprefix("torch."))
    if name.startswith("v0") and find_spec("dgl") is None:
        row.why = "needs DGL, which is missing: pip install 'pdlcheck[dgl]'"
        return row
    cubic = "N^3" in name
    if cubic and (expected := folding_s(graph.num_nodes, device, dtype)) > limit:
        row.why = f"its N x N product alone takes about {expected:.0f} s, estimated from one of {SAMPLE} x {SAMPLE}"
        return row
    run = functools.partial(VERSIONS[name], graph, damping=DAMPING, device=device, dtype=dtype)
    try:
        if not cubic:  # the small product has already loaded everything
            seconds(functools.partial(run, iterations=1))
        one, _ = seconds(functools.partial(run, iterations=1))
        few = rounds if cubic else min(rounds, 4)
        some, scores = seconds(functools.partial(run, iterations=few))
    except (ValueError, MemoryError) as error:
        row.why = str(error)
        return row
    if few < rounds:
        if (expected := some + (some - one) / (few - 1) * (rounds - few)) > limit:
            row.why = f"takes about {expected:.0f} s, estimated from {few} rounds"
            return row
        some, scores = seconds(functools.partial(run, iterations=rounds))
    row.all_s, row.round_s = some, max(some - one, 0.0) / (rounds - 1)
    row.before_s = max(one - row.round_s, 0.0)
    row.error = float(np.abs(scores.double().cpu().numpy() - exact).sum())
    return row


def seconds(run: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Return the seconds of one call, until the device has finished, and its result."""
    began = time.perf_counter()
    scores = run()
    if scores.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began, scores


@functools.cache
def folding_s(num_nodes: int, device: str, dtype: torch.dtype) -> float:
    """Estimate the product of two N x N matrices by ``N**3`` from the better of two SAMPLE x SAMPLE products."""
    matrix = torch.ones(SAMPLE, SAMPLE, device=device, dtype=dtype)
    taken = [seconds(lambda: matrix @ matrix)[0] for _ in range(3)]
    return min(taken[1:]) * (num_nodes / SAMPLE) ** 3


def print_row(row: Row) -> None:
    head = f"{row.version:18}{row.device:>7}{row.dtype:>9}"
    told: Any = f"  not run: {row.why}"
    if row.all_s is not None and row.round_s is not None:
        told = f"{row.all_s:10.3f}{row.before_s:11.3f}{row.round_s * 1e3:13.3f}{row.error:10.1e}"
    print(head + told, flush=True)


if __name__ == "__main__":
    sys.exit(main())
