"""How fast PageRank is: the four published versions on random graphs, and the solver on the Debian packages.

``seconds_per_iteration`` in a row is ``(T(K) - T(1)) / (K - 1)``, so building the matrix is not in it;
``setup_s`` is ``T(1)`` less one iteration; ``edges_per_s`` is ``num_edges / seconds_per_iteration``. The
dense versions read N * N numbers a round and are timed over fewer rounds unless ``--full`` is given, which
also brings the published graph (probability 0.05, 5 million edges) and the published O(N^3) fold of version
3. ``error`` is the L1 distance from :func:`pagerank` at ``tol=1e-12`` for K = 200 rounds, so a fast wrong
answer does not count.
"""

from __future__ import annotations

import functools
import timeit
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
import torch

from pdlcheck.primitives.pagerank import (
    Graph,
    debian_dependencies,
    document_graph,
    pagerank,
    pagerank_v0,
    pagerank_v1,
    pagerank_v2,
    pagerank_v3,
)

N, K, DAMPING = 10_000, 200, 0.85
VERSIONS: dict[str, Callable[..., torch.Tensor]] = {
    "v0": pagerank_v0,
    "v1": pagerank_v1,
    "v1-coo": functools.partial(pagerank_v1, layout="coo"),
    "v2": pagerank_v2,
    "v3": pagerank_v3,
    "v3-matmul": functools.partial(pagerank_v3, fold="matmul"),
}
FEW_ROUNDS = ("v1-coo", "v2", "v3", "v3-matmul")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@functools.cache
def random_graph(mean_degree: int) -> Graph:
    return document_graph(N, mean_degree=mean_degree)


@functools.cache
def exact(mean_degree: int) -> np.ndarray:
    return pagerank(random_graph(mean_degree), tol=1e-12).scores


@functools.cache
def debian() -> Graph:
    return debian_dependencies()


@functools.cache
def debian_networkx() -> nx.DiGraph:
    graph = debian()
    there = nx.DiGraph()
    there.add_nodes_from(range(graph.num_nodes))
    there.add_edges_from(zip(graph.src.tolist(), graph.dst.tolist(), strict=True))
    return there


def synchronised(function: Callable[..., torch.Tensor], device: str, **arguments: Any) -> torch.Tensor:
    """Call, and wait until the device has finished: kernels are launched, not run, when torch returns."""
    scores = function(device=device, **arguments)
    if device == "cuda":
        torch.cuda.synchronize()
    return scores


def warm_seconds(function: Callable[[], Any]) -> float:
    """The shorter of two calls after one that loads libraries, kernels and pages."""
    function()
    return min(timeit.repeat(function, number=1, repeat=2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mean_degree", [10, 100, 500], ids="er{}".format)
def test_version(benchmark: Any, full: bool, mean_degree: int, version: str, device: str, dtype: torch.dtype) -> None:
    if version == "v0" and find_spec("dgl") is None:
        pytest.skip("v0 needs DGL, which is missing: pip install pdlcheck[dgl]")
    if not full and (mean_degree == 500 or version == "v3-matmul"):
        pytest.skip("takes minutes on a CPU; --full runs it")
    graph = random_graph(mean_degree)
    benchmark.group = f"pagerank er{mean_degree} {device} {str(dtype)[6:]}"
    run = functools.partial(synchronised, VERSIONS[version], device, graph=graph, damping=DAMPING, dtype=dtype)
    one = warm_seconds(functools.partial(run, iterations=1))
    rounds = 1 if version in FEW_ROUNDS and device == "cpu" else 3
    iterations = 20 if benchmark.disabled else K  # nothing is timed: enough to see that it works
    scores = benchmark.pedantic(run, kwargs={"iterations": iterations}, rounds=rounds)
    error = float(np.abs(scores.double().cpu().numpy() - exact(mean_degree)).sum())
    assert error <= 2 * DAMPING**iterations + (1e-10 if dtype is torch.float64 else 1e-4)
    if benchmark.disabled:  # nothing was timed
        return
    each = max(benchmark.stats.stats.min - one, 0.0) / (K - 1)
    benchmark.extra_info |= {
        **row(graph, device),
        "K": K,
        "dtype": str(dtype),
        "seconds_per_iteration": each,
        "setup_s": max(one - each, 0.0),
        "edges_per_s": graph.num_edges / each if each else None,
        "error": error,
    }


# Solvers at one true error: networkx and the SciPy loop stop at the step that guarantees what pagerank does.


def ours(tol: float) -> np.ndarray:
    return pagerank(debian(), damping=DAMPING, tol=tol).scores


def networkx(tol: float) -> np.ndarray:
    step = tol * (1 - DAMPING) / DAMPING
    n = debian().num_nodes
    scores = nx.pagerank(debian_networkx(), alpha=DAMPING, tol=step / n, max_iter=2000)
    return np.array([scores[i] for i in range(n)])


def scipy(tol: float) -> np.ndarray:
    graph = debian()
    n = graph.num_nodes
    matrix = sp.csr_array((graph.probabilities, (graph.dst, graph.src)), shape=(n, n))
    x, step = np.full(n, 1 / n), 1.0
    while step > tol * (1 - DAMPING) / DAMPING:
        before = x
        x = (1 - DAMPING) / n + DAMPING * (matrix @ x + x[graph.dangling].sum() / n)
        step = float(np.abs(x - before).sum())
    return x


@pytest.mark.benchmark(group="pagerank debian float64")
@pytest.mark.parametrize("tol", [1e-6, 1e-8], ids="{:.0e}".format)
@pytest.mark.parametrize("solver", [ours, scipy, networkx], ids=["pagerank", "scipy", "networkx"])
def test_debian(benchmark: Any, solver: Callable[[float], np.ndarray], tol: float) -> None:
    debian_networkx()
    scores = benchmark.pedantic(solver, args=(tol,), rounds=5, warmup_rounds=1)
    error = float(np.abs(scores - pagerank(debian(), tol=1e-11).scores).sum())
    assert error <= tol + 1e-11
    benchmark.extra_info |= {**row(debian(), "cpu"), "dtype": "float64", "tol": tol, "error": error}


def row(graph: Graph, device: str) -> dict[str, Any]:
    return {
        "N": graph.num_nodes,
        "num_edges": graph.num_edges,
        "damping": DAMPING,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
