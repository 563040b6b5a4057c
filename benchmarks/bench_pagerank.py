"""The speed of PageRank: the four published versions on random graphs, and the solver on the Debian packages.

A version does K = 200 rounds, beside one round of itself: ``(T(K) - T(1)) / (K - 1)`` is the time of one round without
building the matrix. The dense versions read N * N numbers a round, whatever the graph: on a CPU one graph shows them.
They need ``--full`` there, as does the published graph (probability 0.05, 5 million edges). The published O(N^3) fold
of version 3 takes half a minute a call on a CPU, and is measured on a GPU alone. The result is compared with
:func:`pagerank` at ``tol=1e-12``, so a fast wrong answer does not count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="PageRank needs numba: pip install 'pdlcheck[pagerank]'")

import networkx as nx
import scipy.sparse as sp

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
MEAN_DEGREES = [10, *(pytest.param(degree, marks=pytest.mark.full) for degree in (100, 500))]
PARTS = {"parts": ["1 round"]}  # no other way to do the same
SLOW_ON_CPU = ("v1-coo", "v2", "v3")

pytestmark = pytest.mark.world_size(1)


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


@pytest.mark.benchmark(group="pagerank, 200 rounds", min_rounds=1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mean_degree", MEAN_DEGREES, ids="er{}".format)
def test_version(
    rank_benchmark: Any, device: torch.device, full: bool, mean_degree: int, version: str, dtype: torch.dtype
) -> None:
    if version == "v0" and find_spec("dgl") is None:
        pytest.skip("v0 needs DGL, which is missing: pip install 'pdlcheck[dgl]'")
    if device.type == "cpu" and version == "v3-matmul":
        pytest.skip("takes half a minute a call on a CPU; benchmarks/comparisons/pagerank_experiment.py measures it")
    if device.type == "cpu" and version in SLOW_ON_CPU and not full:
        pytest.skip("takes minutes on a CPU; --full runs it")
    if device.type == "cpu" and version in SLOW_ON_CPU and mean_degree != 100:
        pytest.skip("takes minutes on a CPU; er100 shows it")
    graph = random_graph(mean_degree)

    def ranks(iterations: int) -> torch.Tensor:
        return VERSIONS[version](graph, device=device.type, damping=DAMPING, dtype=dtype, iterations=iterations)

    scores = rank_benchmark(lambda: ranks(K), against={"1 round": lambda: ranks(1)}, iterations=1, facts=PARTS)
    error = float(np.abs(scores.double().cpu().numpy() - exact(mean_degree)).sum())
    assert error <= 2 * DAMPING**K + (1e-10 if dtype is torch.float64 else 1e-4)


# Solvers at one true error: networkx and the SciPy loop stop at the step that guarantees pagerank's error.


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


@pytest.mark.benchmark(group="pagerank of the Debian packages")
@pytest.mark.parametrize("tol", [1e-6, pytest.param(1e-8, marks=pytest.mark.full)], ids="{:.0e}".format)
def test_debian(rank_benchmark: Any, device: torch.device, tol: float) -> None:
    if device.type != "cpu":
        pytest.skip("the peers compute on the CPU")
    debian_networkx()

    def check(scores: np.ndarray) -> None:
        assert float(np.abs(scores - pagerank(debian(), tol=1e-11).scores).sum()) <= tol + 1e-11

    rank_benchmark(ours, tol, against={"scipy": scipy, "networkx": networkx}, check=check)
