"""The time of PageRank beside the least time that its bytes need, dense and sparse.

The floor of a dense round is ``4 N**2`` bytes. The floor of a sparse round is 4 bytes an edge, for its id; every other
number is read or written once for a node. Both are divided by the bandwidth of a copy on the same device, which counts
the bytes read and written. "gather" is one ``values[ids]`` of torch with as many random ids as the graph has edges.
Targets on a GPU: dense within 1.25 of its floor, sparse within 2. On the CPU everything is small and only shows that it
works.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="PageRank needs numba: pip install 'pdlcheck[pagerank]'")

from pdlcheck.primitives.pagerank import Graph, document_graph, pagerank, pagerank_v2, pagerank_v3, rmat, uniform
from pdlcheck.primitives.pagerank.device.solver import CHECK_EVERY, DeviceRounds, sweep_of
from pdlcheck.primitives.pagerank.device.sweep import Problem

DAMPING = 0.85

pytestmark = pytest.mark.world_size(1)


@functools.cache
def copied_per_s(device: torch.device) -> float:
    """Return the bytes that a copy within the device reads and writes in a second, as a median of some copies."""
    source = torch.rand(2**28 if device.type == "cuda" else 2**22, device=device)
    target, taken = torch.empty_like(source), []
    for _ in range(8):
        began = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return 2 * source.nbytes / median(taken[1:])


@functools.cache
def uniform_graph(scale: int) -> Graph:
    return uniform(2**scale, 16 * 2**scale)


@functools.cache
def rmat_graph(scale: int) -> Graph:
    return rmat(scale, 16 * 2**scale)


@pytest.mark.benchmark(group="dense round of pagerank", min_rounds=2)
@pytest.mark.parametrize("version", [pagerank_v2, pagerank_v3], ids=["v2", "v3"])
def test_dense_round(
    rank_benchmark: Any, device: torch.device, full: bool, version: Callable[..., torch.Tensor]
) -> None:
    """Time 201 rounds and one round: one round is a 200th of the difference."""
    n = (40_000 if full else 10_000) if device.type == "cuda" else 500
    graph = document_graph(n, mean_degree=10)

    def ranks(iterations: int) -> torch.Tensor:
        return version(graph, damping=DAMPING, device=device.type, dtype=torch.float32, iterations=iterations)

    floor_s = 4 * n * n / copied_per_s(device)
    others = {"1 round": lambda: ranks(1)}
    facts = {"N": n, "floor_s": floor_s, "parts": [*others]}
    scores = rank_benchmark(lambda: ranks(201), against=others, iterations=1, facts=facts)
    assert float(scores.sum()) == pytest.approx(1, abs=1e-3)


@pytest.mark.benchmark(group="sparse round of pagerank")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("make", [uniform_graph, rmat_graph], ids=["uni", "rmat"])
@pytest.mark.parametrize("kernel", ["csr", pytest.param("triton", marks=pytest.mark.gpu)])
def test_sparse_round(
    rank_benchmark: Any, device: torch.device, kernel: Any, make: Callable[[int], Graph], dtype: torch.dtype
) -> None:
    """Time some rounds, each beside one ``values[ids]`` of torch with as many random ids."""
    graph = make(20 if device.type == "cuda" else 12)
    n = graph.num_nodes
    start = torch.full((n,), 1 / n, dtype=torch.float64, device=device)
    sweep = sweep_of(graph, Problem(DAMPING, start, start), kernel)
    rounds = DeviceRounds(sweep, DAMPING, start, float(graph.dangling.mean()), dtype)
    ids = torch.randint(n, (graph.num_edges,), dtype=torch.int32, device=device)
    values, found = torch.rand(n, device=device), torch.empty(graph.num_edges, device=device)

    def gathers() -> None:
        for _ in range(CHECK_EVERY):
            torch.index_select(values, 0, ids, out=found)

    floor_s = 4 * graph.num_edges / copied_per_s(device) * CHECK_EVERY
    facts = {"rounds": CHECK_EVERY, "edges": graph.num_edges, "floor_s": floor_s, "parts": ["gather"]}
    rank_benchmark(lambda: rounds.advance(CHECK_EVERY), against={"gather": gathers}, facts=facts)


@pytest.mark.benchmark(group="solve pagerank")
@pytest.mark.parametrize("tol", [1e-6, pytest.param(1e-8, marks=pytest.mark.full)], ids="{:.0e}".format)
@pytest.mark.parametrize("make", [uniform_graph, rmat_graph], ids=["uni", "rmat"])
def test_solve(rank_benchmark: Any, device: torch.device, make: Callable[[int], Graph], tol: float) -> None:
    graph = make(20 if device.type == "cuda" else 12)
    kernel = "auto" if device.type == "cuda" else "csr"
    solve = functools.partial(pagerank, graph, damping=DAMPING, tol=tol, device=device.type, kernel=kernel)
    result = rank_benchmark(solve)
    error = float(np.abs(result.scores - pagerank(graph, tol=1e-12).scores).sum())
    assert result.converged
    assert error <= tol + 1e-12
