"""Small directed graphs for property tests of PageRank, with the shapes on which implementations differ.

The strategies draw plain :class:`Edges`. The argument ``build`` converts them to the graph type under test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

__all__ = ["CORNERS", "Edges", "graph_and_relabelling", "graphs", "scattered", "scattered_graphs"]


@dataclass(frozen=True, eq=False)
class Edges:
    """A directed multigraph: edge ``e`` goes from ``src[e]`` to ``dst[e]`` with weight ``weights[e]``.

    If ``weights`` is None, every edge has weight 1.
    """

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    num_nodes: int
    weights: NDArray[np.float64] | None = None

    def __repr__(self) -> str:
        """Return the call that makes these edges, without weights if there are none."""
        weights = "" if self.weights is None else f", weights={self.weights.tolist()}"
        return f"Edges({self.src.tolist()}, {self.dst.tolist()}, {self.num_nodes}{weights})"


def edges(src: Any, dst: Any, num_nodes: int, weights: Any = None) -> Edges:
    """Build :class:`Edges` from lists."""
    ids = np.array(src, np.int64), np.array(dst, np.int64)
    return Edges(*ids, num_nodes, None if weights is None else np.array(weights, np.float64))


CORNERS: Mapping[str, Edges] = {
    "no nodes": edges([], [], 0),
    "one node": edges([], [], 1),
    "one node with a self-loop": edges([0], [0], 1),
    "no edges": edges([], [], 3),
    "one edge": edges([0], [1], 2),
    "two parts and an isolated node": edges([0, 1, 2], [1, 0, 3], 5),
    "path of 50 nodes": edges(range(49), range(1, 50), 50),
    "self-loop beside an edge": edges([0, 0, 1], [0, 1, 2], 3),
    "dangling node with a self-loop upstream": edges([0, 0], [0, 1], 2),
    "edge that occurs three times": edges([0, 0, 0, 0, 1], [1, 1, 1, 2, 0], 3),
    "star into a hub": edges(range(1, 30), [0] * 29, 30),
    "star out of a hub": edges([0] * 29, range(1, 30), 30),
    "weights that differ": edges([0, 0, 1, 2], [1, 2, 2, 0], 3, [1, 3, 0.5, 7]),
    "every weight 0": edges([0, 0, 1], [1, 2, 0], 3, [0, 0, 0]),
    "out-weights of one node 0": edges([0, 0, 1], [1, 2, 0], 3, [0, 0, 2]),
    "weights of 1e300 and 1e-300": edges([0, 0, 1, 1], [1, 2, 2, 0], 3, [1e300, 1e300, 1e-300, 3e-300]),
}
"""Named graphs that a drawn one might miss; each is a case of the contract."""


@st.composite
def graphs(
    draw: st.DrawFn,
    build: Callable[..., Any] = Edges,
    *,
    max_nodes: int = 8,
    max_edges: int = 16,
    weighted: bool | None = None,
) -> Any:
    """Draw a directed multigraph with at most ``max_nodes`` nodes and ``max_edges`` edges.

    The result is ``build(src, dst, num_nodes, weights)``. Self-loops, repeated edges, dangling and isolated nodes,
    several components and the empty graph all occur. Weights are multiples of 1/4 from 0 to 4. ``weighted=False`` draws
    no weights, ``True`` always draws them, and ``None`` draws either. Examples shrink towards few nodes, few edges and
    no weights.

    Example::

        @given(graph=graphs(Graph.from_edges, weighted=False))
        def test_scores_sum_to_one(graph): ...
    """
    num_nodes = draw(st.integers(0, max_nodes))
    node = st.integers(0, max(num_nodes - 1, 0))
    pairs = draw(st.lists(st.tuples(node, node), max_size=max_edges if num_nodes else 0))
    src = np.array([u for u, _ in pairs], np.int64)
    dst = np.array([v for _, v in pairs], np.int64)
    weights = None
    if weighted or (weighted is None and draw(st.booleans())):
        quarters = draw(st.lists(st.integers(0, 16), min_size=len(pairs), max_size=len(pairs)))
        weights = np.array(quarters, np.float64) / 4
    return build(src, dst, num_nodes, weights)


@st.composite
def graph_and_relabelling(draw: st.DrawFn, build: Callable[..., Any] = Edges) -> tuple[Any, Any, list[int]]:
    """Draw a graph, the same graph with renamed nodes and shuffled edges, and the new id of each node."""
    graph = draw(graphs(build))
    permutation = draw(st.permutations(range(graph.num_nodes)))
    order = np.array(draw(st.permutations(range(len(graph.src)))), np.int64)
    new = np.array(permutation, np.int64)
    weights = None if graph.weights is None else graph.weights[order]
    return graph, build(new[graph.src[order]], new[graph.dst[order]], graph.num_nodes, weights), permutation


@st.composite
def scattered_graphs(
    draw: st.DrawFn,
    build: Callable[..., Any] = Edges,
    *,
    world_sizes: st.SearchStrategy[int] = st.integers(1, 4),  # noqa: B008  # a strategy never changes
    max_nodes: int = 8,
    max_edges: int = 16,
    weighted: bool | None = None,
) -> list[Any]:
    """Draw one graph of :func:`graphs` and distribute its edges over ranks.

    The result has one graph for each rank, all with the same ``num_nodes``. Ranks without edges, ranks that hold edges
    between nodes of other ranks, and more ranks than nodes all occur. Examples shrink towards one rank, then towards
    rank 0 holding every edge.
    """
    world_size = draw(world_sizes)
    whole = draw(graphs(max_nodes=max_nodes, max_edges=max_edges, weighted=weighted))
    edges = len(whole.src)
    holder = np.array(draw(st.lists(st.integers(0, world_size - 1), min_size=edges, max_size=edges)), np.int64)
    return scattered(whole, holder, world_size, build)


def scattered(graph: Edges, holder: Any, world_size: int, build: Callable[..., Any] = Edges) -> list[Any]:
    """Split ``graph`` into one graph for each rank: rank ``holder[e]`` holds edge ``e``.

    Example:
        >>> scattered(edges([0, 1], [1, 0], 2), [1, 0], 2)
        [Edges([1], [0], 2), Edges([0], [1], 2)]
    """
    parts = []
    for rank in range(world_size):
        mine = np.flatnonzero(np.asarray(holder) == rank)
        weights = None if graph.weights is None else graph.weights[mine]
        parts.append(build(graph.src[mine], graph.dst[mine], graph.num_nodes, weights))
    return parts
