"""The arguments of each rank, compared before any edge moves: every rank continues, or all raise the same error."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pdlcheck.primitives.agreement import require_agreement
from pdlcheck.primitives.arguments import Members, wire_device
from pdlcheck.primitives.pagerank.arguments import distribution, require_damping, require_iterations
from pdlcheck.primitives.pagerank.formats import as_graph
from pdlcheck.primitives.pagerank.graph import NARROW, Float64, Graph, Ids
from pdlcheck.primitives.pagerank.memory import rank_nbytes
from pdlcheck.primitives.pagerank.node_ids import NodeIds

__all__ = ["Edges", "agree_on_edges", "agree_on_numbers", "agree_on_vectors"]

CALLER = "pagerank_over_ranks"
ENDLESS = 1 << 56  # nodes; the sum of their loads still fits in int64, and no machines have memory for more


@dataclass(frozen=True)
class Edges:
    """The edges that this rank holds; ``nodes`` is a graph without edges that has the nodes of all ranks."""

    src: Ids
    dst: Ids
    weights: Float64 | None
    nodes: Graph


def agree_on_numbers(damping: Any, tol: Any, max_iter: Any, who: Members) -> tuple[float, float, float]:
    """Return the three numbers, checked and equal on every rank; a ``max_iter`` of None becomes infinity."""

    def facts() -> dict[str, object]:
        if not (isinstance(tol, int | float | np.number) and 0 < tol < math.inf):
            raise ValueError(f"tol must be a positive number, the largest L1 error wanted, got {tol!r}; 1e-8 is usual")
        rounds = math.inf if max_iter is None else require_iterations("max_iter", max_iter)
        return {"damping": require_damping(damping), "tol": float(tol), "max_iter": rounds}

    require_agreement(CALLER, who, facts)
    return float(damping), float(tol), math.inf if max_iter is None else int(max_iter)


def agree_on_edges(graph: Any, num_nodes: int | None, replicated: bool, who: Members) -> Edges:
    """Return this rank's edges; with ``replicated``, an equal share of the edges that every rank holds."""
    read: list[Graph] = []

    def facts() -> dict[str, object]:
        found = _read(graph, num_nodes)
        read.append(found)
        sized = num_nodes is not None or not isinstance(graph, tuple)
        same: dict[str, object] = {
            "replicated": bool(replicated),
            "num_nodes": found.num_nodes if sized else None,
            "names of the nodes": _digest_of_names(found.names),
        }
        if replicated:
            same["edges"] = f"{found.num_edges} with digest " + _digest(found.src, found.dst, found.weights)
        return same

    require_agreement(CALLER, who, facts)
    found = read[0]
    mine = slice(None)
    if replicated:
        bounds = found.num_edges * np.arange(who.world_size + 1) // who.world_size
        mine = slice(int(bounds[who.rank]), int(bounds[who.rank + 1]))
    last, weighted = _largest([found.num_nodes - 1, found.weights is not None], who)  # 2**63 nodes still have int64 ids
    size = last + 1
    if size > ENDLESS:
        needed = rank_nbytes(size, size, 0, 0) / 2**30
        cure = "number the nodes from 0 without large gaps"
        raise MemoryError(f"{CALLER} of {size} nodes needs {needed:.1f} GiB on all ranks together; {cure}")
    weights = None
    if weighted:
        weights = np.ones(found.num_edges) if found.weights is None else found.weights
        weights = weights[mine]
    nobody = np.empty(0, np.int64)
    kind = np.int32 if size < NARROW else np.int64  # the same on every rank
    src: Ids = found.src[mine].astype(kind, copy=False)
    dst: Ids = found.dst[mine].astype(kind, copy=False)
    return Edges(src, dst, weights, Graph(nobody, nobody, size, names=found.names))


def agree_on_vectors(nodes: Graph, vectors: dict[str, Any], who: Members) -> dict[str, Float64 | None]:
    """Return each vector over ``nodes``, checked and scaled to sum 1; None, for uniform, stays None."""
    found: dict[str, Float64 | None] = {}

    def facts() -> dict[str, object]:
        for name, values in vectors.items():
            found[name] = None if values is None else distribution(name, values, nodes)
        return {name: None if vector is None else f"digest {_digest(vector)}" for name, vector in found.items()}

    require_agreement(CALLER, who, facts)
    return found


def _read(graph: Any, num_nodes: int | None) -> Graph:
    if num_nodes is not None and isinstance(graph, tuple) and len(graph) in (2, 3):
        return Graph.from_edges(graph[0], graph[1], num_nodes, graph[2] if len(graph) == 3 else None)
    found = as_graph(graph)
    if num_nodes is not None and found.num_nodes != num_nodes:
        raise ValueError(f"num_nodes is {num_nodes}, but the graph has {found.num_nodes} nodes; leave num_nodes out")
    return found


def _digest_of_names(names: Sequence[Hashable] | None) -> str | None:
    if isinstance(names, NodeIds):
        return _digest(names.array)
    return None if names is None else _digest(repr(names).encode())


def _digest(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"none" if part is None else part if isinstance(part, bytes) else np.ascontiguousarray(part).data)
    return digest.hexdigest()[:12]


def _largest(values: list[int], who: Members) -> list[int]:
    found = torch.tensor(values, dtype=torch.int64, device=wire_device(who.group))
    if who.world_size > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=who.group)
    return [int(value) for value in found]
