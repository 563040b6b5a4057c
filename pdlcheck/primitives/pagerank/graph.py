"""The directed graph that every PageRank version takes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from pdlcheck.primitives.pagerank.node_ids import NodeIds
from pdlcheck.primitives.pagerank.sparse_format import well_formed
from pdlcheck.primitives.pagerank.threads import ENOUGH, Team, ranges

__all__ = ["Float64", "Graph", "Ids", "Int64", "borrowed_graph", "ids_of", "largest_id"]

Ids = NDArray[np.integer[Any]]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
NARROW = np.iinfo(np.int32).max  # from this number of nodes on, ids are int64


def borrowed_graph(src: Any, dst: Any, weights: Any = None) -> Graph:
    """Return the :class:`Graph` of these edges without a copy of contiguous int32 and int64 ids.

    Use it for one call: the graph is valid only as long as those arrays do not change. Errors are those of
    :class:`Graph`.
    """
    src, dst = ids_of("src", src), ids_of("dst", dst)
    num_nodes = largest_id(src, dst) + 1
    graph = Graph((), (), num_nodes)  # type: ignore[arg-type]
    for name, ids in (("src", src), ("dst", dst)):
        object.__setattr__(graph, name, _checked_ids(name, ids, num_nodes, copied=False))
    _require_equal_lengths(src, dst)
    if weights is not None:
        object.__setattr__(graph, "weights", _checked_weights(weights, len(src)))
    return graph


@dataclass(frozen=True, eq=False)
class Graph:
    """A directed multigraph: edge ``e`` goes from ``src[e]`` to ``dst[e]`` and has the weight ``weights[e]``.

    The weights of edges that occur twice add up; a self-loop is an edge like any other. Arrays are copied and
    read-only, so a graph never changes after its checks. Ids are int32, or int64 from 2**31 - 1 nodes on: 8 or 16 bytes
    per edge. Weights take 8 more. Products such as ``src * num_nodes`` need ``src.astype(np.int64)`` first.

    Args:
        src, dst: node ids in ``[0, num_nodes)``, integers, one per edge.
        num_nodes: 0 or more; nodes without edges count.
        weights: finite and not negative, one per edge; ``None`` means 1 for every edge.
        names: one per node, distinct; ``None`` names a node by its number. Kept as a tuple, or as :class:`NodeIds`.

    Raises:
        ValueError: an id is out of range; a weight is negative, infinite or NaN; lengths differ; names repeat.
        TypeError: ids are not integers, or ``num_nodes`` is not one.

    Example:
        >>> Graph.from_edges([0, 0, 1], [1, 2, 2])
        Graph(num_nodes=3, num_edges=3, weighted=False)
    """

    __networkx_backend__ = "pdlcheck"  # networkx calls this backend for a Graph

    src: Ids
    dst: Ids
    num_nodes: int
    weights: Float64 | None = None
    names: Sequence[Hashable] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.num_nodes, bool) or not isinstance(self.num_nodes, int | np.integer):
            raise TypeError(f"num_nodes must be an int, got {self.num_nodes!r}")
        if self.num_nodes < 0:
            raise ValueError(f"num_nodes must be 0 or more, got {self.num_nodes}")
        if self.num_nodes > 2**63:
            raise ValueError(f"num_nodes must be at most 2**63, ids are int64, got {self.num_nodes}; number from 0")
        object.__setattr__(self, "num_nodes", int(self.num_nodes))
        for name in ("src", "dst"):
            object.__setattr__(self, name, _checked_ids(name, getattr(self, name), self.num_nodes))
        _require_equal_lengths(self.src, self.dst)
        if self.weights is not None:
            object.__setattr__(self, "weights", _checked_weights(self.weights, len(self.src)))
        if self.names is not None:
            names = self.names if isinstance(self.names, NodeIds) else tuple(self.names)
            distinct = len(names) if isinstance(names, NodeIds) else len(set(names))
            if len(names) != self.num_nodes or distinct != len(names):
                raise ValueError(
                    f"names must be {self.num_nodes} distinct names, one per node, got {len(names)} "
                    f"of which {distinct} are distinct"
                )
            object.__setattr__(self, "names", names)

    @classmethod
    def from_edges(cls, src: Any, dst: Any, num_nodes: int | None = None, weights: Any = None) -> Graph:
        """Return the graph of two lists, arrays or tensors of ids.

        ``num_nodes`` is the largest id + 1 by default.
        """
        src, dst = ids_of("src", src), ids_of("dst", dst)
        if num_nodes is None:
            num_nodes = 1 + largest_id(src, dst)
        return cls(src, dst, num_nodes, weights)

    @classmethod
    def from_networkx(cls, graph: nx.Graph[Any], *, weight: str | None = "weight") -> Graph:
        """Return the graph of a networkx graph of any class; nodes keep their names.

        An undirected edge becomes one edge in each direction, an undirected self-loop one edge. ``weight`` is the edge
        attribute to read, with 1 for an edge that lacks it; ``None`` ignores weights.
        """
        names = tuple(graph.nodes)
        index = {name: i for i, name in enumerate(names)}
        edges = graph.number_of_edges()
        src = np.fromiter((index[u] for u, _ in graph.edges()), np.int64, edges)
        dst = np.fromiter((index[v] for _, v in graph.edges()), np.int64, edges)
        weights = np.ones(edges)
        if weight is not None:
            try:
                weights = np.fromiter((w for _, _, w in graph.edges(data=weight, default=1)), np.float64, edges)
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(
                    f"graph: the edge attribute {weight!r} must be a number; weight=None ignores it"
                ) from error
        if not graph.is_directed():
            back = src != dst
            src, dst = np.concatenate([src, dst[back]]), np.concatenate([dst, src[back]])
            weights = np.concatenate([weights, weights[back]])
        return cls(src, dst, len(names), None if (weights == 1).all() else weights, names)

    @classmethod
    def from_scipy(cls, matrix: Any) -> Graph:
        """Return the graph of a square sparse matrix, read like ``scipy.sparse.csgraph``: entry (i, j) is edge i -> j.

        Duplicate entries add. The adjacency of :func:`pagerank_v1` is the transpose: row = destination.

        Raises:
            ValueError: the matrix is not square, or its index arrays contradict each other or the shape.
        """
        if len(set(matrix.shape)) != 1 or matrix.ndim != 2:
            raise ValueError(f"graph: an adjacency matrix must be square, got shape {matrix.shape}")
        coo = well_formed(matrix).tocoo()
        weights = np.asarray(coo.data)
        return cls(coo.row, coo.col, matrix.shape[0], None if (weights == 1).all() else weights)

    @classmethod
    def from_dgl(cls, graph: Any, *, weight: str | None = None) -> Graph:
        """Return the graph of a homogeneous DGL graph.

        ``weight`` is the edge feature to read; ``None`` means weight 1.
        """
        if not graph.is_homogeneous:
            raise ValueError(
                f"graph: a DGL graph must have one type of nodes and one of edges, got {graph.ntypes} and "
                f"{graph.canonical_etypes}; number all nodes together with dgl.to_homogeneous(graph)"
            )
        src, dst = graph.edges(order="eid")
        return cls(src, dst, int(graph.num_nodes()), None if weight is None else graph.edata[weight])

    @property
    def num_edges(self) -> int:
        """Return the number of edges."""
        return len(self.src)

    @cached_property
    def dangling(self) -> NDArray[np.bool_]:
        """Return a bool per node: whether it has no out-edge with a weight above 0."""
        src = self.src if self.weights is None else self.src[self.weights > 0]
        degree: Int64 = np.bincount(src, minlength=self.num_nodes)
        return np.equal(degree, 0)

    @cached_property
    def probabilities(self) -> Float64:
        """Return for each edge its share of its source's out-weight; 0 for an edge of a dangling node.

        Weights are first divided by the largest weight of their source, so neither 1e308 nor 1e-320 overflows.
        """
        weights = self.scaled_weights()
        out = np.bincount(self.src, weights, self.num_nodes)
        return np.divide(weights, out[self.src], out=np.zeros_like(weights), where=weights > 0)

    def scaled_weights(self) -> Float64:
        """Return the weights, each divided by the largest of its source node; this does not change any score."""
        if self.weights is None:
            return np.ones(self.num_edges)
        largest = np.zeros(self.num_nodes)
        np.maximum.at(largest, self.src, self.weights)
        return np.divide(self.weights, largest[self.src], out=np.zeros(self.num_edges), where=self.weights > 0)

    def relabelled(self, permutation: Sequence[int] | Ids) -> Graph:
        """Return the same graph with node ``i`` renumbered to ``permutation[i]``; names move along."""
        new = ids_of("permutation", permutation)
        if not np.array_equal(np.sort(new), np.arange(self.num_nodes)):
            raise ValueError(f"permutation must hold each id below {self.num_nodes} once, got {new.tolist()[:20]}")
        names = None if self.names is None else tuple(self.names[old] for old in np.argsort(new))
        return Graph(new[self.src], new[self.dst], self.num_nodes, self.weights, names)

    def vector(self, name: str, values: Any) -> Float64:
        """Return ``values`` as a float64 vector with one number per node.

        They are one number per node, or a dict from node (its name, if nodes have names) to number.
        """
        if isinstance(values, Mapping):
            places = {node: self._place(node) for node in values}
            unknown = [node for node, place in places.items() if place is None]
            if unknown:
                raise ValueError(f"{name}: {unknown[0]!r} is not a node of the graph; remove it or add the node")
            vector = np.zeros(self.num_nodes)
            vector[[place for place in places.values() if place is not None]] = _numbers(name, list(values.values()))
            return vector
        vector = _numbers(name, values)
        if vector.shape != (self.num_nodes,):
            raise ValueError(
                f"{name} must be one number per node, shape ({self.num_nodes},), got shape {vector.shape}; "
                "a dict from node to number may leave nodes out"
            )
        return vector

    def _place(self, node: Any) -> int | None:
        """Return the id of a node; ``None`` if there is no such node.

        The node is given by its name if nodes have names, else by a number that equals its id.
        """
        if isinstance(self.names, NodeIds):
            return self.names.place(node)
        if self.names is not None:
            return self._ids.get(node)
        if isinstance(node, float | np.floating) and node.is_integer():
            node = int(node)
        return int(node) if isinstance(node, int | np.integer) and 0 <= node < self.num_nodes else None

    @cached_property
    def _ids(self) -> dict[Hashable, int]:
        return {name: place for place, name in enumerate(self.names or ())}

    def __repr__(self) -> str:
        weighted = self.weights is not None
        return f"Graph(num_nodes={self.num_nodes}, num_edges={self.num_edges}, weighted={weighted})"


def _on_host(name: str, values: Any) -> Any:
    """Return a tensor of any device and precision as an array; return any other object unchanged."""
    if isinstance(values, np.ma.MaskedArray) and np.ma.getmaskarray(values).any():
        raise ValueError(f"{name} is masked in places, where it has no values; pass its filled(...) or leave them out")
    if not hasattr(values, "detach"):
        return values
    tensor = values.detach().cpu()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


def ids_of(name: str, values: Any) -> Ids:
    """Return ``values`` as an array of integers, without a copy if they are one."""
    array = np.asarray(_on_host(name, values))
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, one id per edge, got shape {array.shape}")
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"{name} must hold integers, got dtype {array.dtype}; convert node names to ids 0, 1, ... first"
        )
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} holds {array.max()}, ids must be below 2**63; number the nodes from 0")
    return array


def largest_id(src: Ids, dst: Ids) -> int:
    """Return the largest id in both arrays, -1 if they are empty."""
    return max(-1, *(int(ids.max()) if ids.size else -1 for ids in (src, dst)))


def _require_equal_lengths(src: Ids, dst: Ids) -> None:
    if len(src) != len(dst):
        raise ValueError(
            f"src and dst must have one id per edge, got lengths {len(src)} and {len(dst)}; make them equally long"
        )


def _checked_ids(name: str, values: Any, num_nodes: int, *, copied: bool = True) -> Ids:
    """Return ``values`` as read-only ids, in the narrowest dtype for ``num_nodes``.

    They are a copy. With ``copied=False``, a contiguous int32 or int64 array is not copied.

    Raises:
        ValueError: an id is not in ``[0, num_nodes)``.
    """
    given = ids_of(name, values)
    copied = copied or given.dtype not in (np.int32, np.int64) or not given.flags.c_contiguous
    ids: Ids = np.empty(len(given), np.int32 if num_nodes < NARROW else np.int64) if copied else given.view()
    outside: list[int] = []

    def check(first: int, last: int) -> None:
        part = given[first:last]
        if part.size and (part.min() < 0 or part.max() >= num_nodes):
            outside.append(first + int(np.flatnonzero((part < 0) | (part >= num_nodes))[0]))
        if copied:
            np.copyto(ids[first:last], part, casting="unsafe")

    with Team(len(given) // ENOUGH) as team:
        parts = ranges(len(given), team.size)
        team.run(lambda k: check(*parts[k]))
    if outside:
        at = min(outside)
        raise ValueError(
            f"{name} holds {given[at]} at {at}, ids must be in [0, {num_nodes}); "
            "correct the id or pass a larger num_nodes"
        )
    ids.setflags(write=False)
    return ids


def _numbers(name: str, values: Any) -> Float64:
    """Return a copy of ``values`` in float64."""
    given = np.asarray(_on_host(name, values))
    if given.dtype.kind == "c":
        raise TypeError(f"{name} must hold real numbers, got dtype {given.dtype}; pass their absolute values, perhaps")
    try:
        return np.array(given, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must hold numbers that float64 has ({error}); convert them first") from error


def _checked_weights(values: Any, num_edges: int) -> Float64:
    weights = _numbers("weights", values)
    if weights.shape != (num_edges,):
        raise ValueError(f"weights must be one number per edge, shape ({num_edges},), got shape {weights.shape}")
    bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if bad.size:
        raise ValueError(
            f"weights holds {weights[bad[0]]} at {bad[0]}; a weight must be finite and not negative, "
            "0 stands for an edge that carries nothing"
        )
    weights.setflags(write=False)
    return weights
