"""How near PageRank comes to the least time that its bytes need, dense and sparse.

The floor of a dense round is ``4 N**2`` bytes, that of a sparse one 4 bytes an edge (its id; every other number is read
or written once for a node), both over the bandwidth of a copy on the same device, which counts the bytes read and
written. "gather" is one ``values[ids]`` of torch with as many random ids as the graph has edges. Targets on a GPU:
dense within 1.25 of its floor, sparse within 2. On the CPU everything is small and shows that it works.
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

from pdlcheck.primitives.pagerank import Graph, document_graph, pagerank, pagerank_v2, pagerank_v3, rmat, uniform
from pdlcheck.primitives.pagerank.device.solver import CHECK_EVERY, DeviceRounds, sweep_of
from pdlcheck.primitives.pagerank.device.sweep import Problem

DAMPING = 0.85
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PLACES = [("cpu", "csr"), *(pytest.param("cuda", kernel, marks=pytest.mark.gpu) for kernel in ("csr", "triton"))]


def seconds_of(run: Callable[[], Any], device: str, times: int = 7) -> float:
    """The median of some calls after one that loads kernels, the device waited for."""
    taken = []
    for _ in range(times + 1):
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


@functools.cache
def copied_per_s(device: str) -> float:
    """Bytes read and written by a copy within the device, a second."""
    source = torch.rand(2**28 if device == "cuda" else 2**22, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes * 8 / seconds_of(lambda: [target.copy_(source) for _ in range(8)], device)


def gather_s(num_nodes: int, num_edges: int, device: str) -> float:
    """Seconds of one random number for each edge."""
    ids = torch.randint(num_nodes, (num_edges,), dtype=torch.int32, device=device)
    values, found = torch.rand(num_nodes, device=device), torch.empty(num_edges, device=device)
    return seconds_of(lambda: [torch.index_select(values, 0, ids, out=found) for _ in range(8)], device) / 8


@functools.cache
def uniform_graph(scale: int) -> Graph:
    return uniform(2**scale, 16 * 2**scale)


@functools.cache
def rmat_graph(scale: int) -> Graph:
    return rmat(scale, 16 * 2**scale)


@pytest.mark.parametrize("version", [pagerank_v2, pagerank_v3], ids=["v2", "v3"])
@pytest.mark.parametrize("device", DEVICES)
def test_dense_round(benchmark: Any, full: bool, device: str, version: Callable[..., torch.Tensor]) -> None:
    n = (40_000 if full else 10_000) if device == "cuda" else 500
    rounds = 201 if device == "cuda" else 21
    graph = document_graph(n, mean_degree=10)
    run = functools.partial(version, graph, damping=DAMPING, device=device, dtype=torch.float32)
    scores = benchmark.pedantic(run, kwargs={"iterations": rounds}, rounds=1)
    assert float(scores.sum()) == pytest.approx(1, abs=1e-3)
    few, many = (seconds_of(functools.partial(run, iterations=k), device, 5) for k in (1, rounds))
    each_s, floor_s = (many - few) / (rounds - 1), 4 * n * n / copied_per_s(device)
    tell(benchmark, f"dense float32 {version.__name__[-2:]}, N={n}", device, each_s, floor_s, target=1.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("make", [uniform_graph, rmat_graph], ids=["uni", "rmat"])
@pytest.mark.parametrize(("device", "kernel"), PLACES)
def test_sparse_round(
    benchmark: Any, device: str, kernel: Any, make: Callable[[int], Graph], dtype: torch.dtype
) -> None:
    graph = make(20 if device == "cuda" else 12)
    n = graph.num_nodes
    start = torch.full((n,), 1 / n, dtype=torch.float64, device=device)
    sweep = sweep_of(graph, Problem(DAMPING, start, start), kernel)
    rounds = DeviceRounds(sweep, DAMPING, start, float(graph.dangling.mean()), dtype)
    benchmark.pedantic(rounds.advance, args=(CHECK_EVERY,), rounds=1)
    each_s = seconds_of(lambda: rounds.advance(CHECK_EVERY), device) / CHECK_EVERY
    gathered_s, floor_s = gather_s(n, graph.num_edges, device), 4 * graph.num_edges / copied_per_s(device)
    words = f"sparse {make.__name__[:-6]} {str(dtype)[6:]} {kernel}, {graph.num_edges} edges"
    tell(benchmark, words, device, each_s, floor_s, target=2)
    benchmark.extra_info["row"] += f", {each_s / gathered_s:.2f} of a gather ({gathered_s * 1e6:.0f} us)"


@pytest.mark.parametrize("tol", [1e-6, 1e-8], ids="{:.0e}".format)
@pytest.mark.parametrize("make", [uniform_graph, rmat_graph], ids=["uni", "rmat"])
@pytest.mark.parametrize("device", DEVICES)
def test_solve(benchmark: Any, device: str, make: Callable[[int], Graph], tol: float) -> None:
    graph = make(20 if device == "cuda" else 12)
    fresh = Graph(graph.src, graph.dst, graph.num_nodes)
    kernel = "auto" if device == "cuda" else "csr"
    solve = functools.partial(pagerank, damping=DAMPING, tol=tol, device=device, kernel=kernel)
    began = time.perf_counter()
    solve(fresh)
    first_s = time.perf_counter() - began
    result = benchmark.pedantic(solve, args=(fresh,), rounds=5, warmup_rounds=1)
    error = float(np.abs(result.scores - pagerank(graph, tol=1e-12).scores).sum())
    assert result.converged and error <= tol + 1e-12
    benchmark.extra_info["row"] = (
        f"solve {make.__name__[:-6]} to {tol:.0e} on {device}: {benchmark.stats.stats.median * 1e3:.2f} ms, "
        f"{first_s * 1e3:.0f} ms with the layout of the edges, {result.iterations} rounds, true error {error:.1e}"
        if not benchmark.disabled
        else ""
    )


def tell(benchmark: Any, words: str, device: str, each_s: float, floor_s: float, target: float) -> None:
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    benchmark.extra_info |= {"seconds_per_round": each_s, "floor_s": floor_s, "device": name}
    benchmark.extra_info["row"] = (
        f"{words} on {name}: {each_s * 1e6:.0f} us a round, {each_s / floor_s:.2f} of its floor of {floor_s * 1e6:.1f} "
        f"us at {copied_per_s(device) / 1e9:.0f} GB/s copied" + (f", target {target:g}" if device == "cuda" else "")
    )
