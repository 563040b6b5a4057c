"""The edges of a graph as tensors of one device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdlcheck.primitives.pagerank.arguments import require_memory
from pdlcheck.primitives.pagerank.graph import Graph
from pdlcheck.primitives.pagerank.memory import DEVICE_VECTORS, HOST, SORTED

__all__ = ["DeviceEdges", "edges_on", "require_room_on"]


@dataclass(frozen=True, eq=False)
class DeviceEdges:
    """Edge ``e`` goes from ``src[e]`` to ``dst[e]`` (int64) and carries ``shares[e]`` of its source's rank.

    ``shares`` (float64) is None where the edges of a node share alike; ``out_degree`` (int32, one per node) then counts
    them, else it is 1, or 0 for a dangling node. ``share_error`` says how often a share was rounded.
    """

    src: Tensor
    dst: Tensor
    num_nodes: int
    shares: Tensor | None
    out_degree: Tensor
    share_error: float


def require_room_on(device: torch.device, graph: Graph, given: int, *, laid_out: bool) -> None:
    """Raise MemoryError where ``device``, or the host, has no room to rank ``graph``.

    Args:
        given: how many vectors over the nodes go there too.
        laid_out: the edges are there already.
    """
    cure = "use device='cpu' with kernel='auto', which takes less, or fewer edges"
    for where, peak in (("cpu", HOST), (device, SORTED)):
        nbytes = graph.num_nodes * (peak.per_node + DEVICE_VECTORS * given)
        if not laid_out:
            nbytes += peak.nbytes(graph) - graph.num_nodes * peak.per_node
        require_memory(f"pagerank on {device}", nbytes, where, what=f"ranking {graph}", cure=cure)


def edges_on(graph: Graph, device: torch.device) -> DeviceEdges:
    """The edges of ``graph`` on ``device``."""
    src = torch.tensor(graph.src, dtype=torch.int64, device=device)
    dst = torch.tensor(graph.dst, dtype=torch.int64, device=device)
    degree = torch.bincount(src, minlength=graph.num_nodes)
    weights = graph.weights
    if weights is None or (weights.size > 0 and weights.min() == weights.max() > 0):
        return DeviceEdges(src, dst, graph.num_nodes, None, degree.int(), 0.0)
    shares = torch.tensor(graph.probabilities, dtype=torch.float64, device=device)
    goes_on = torch.tensor(~graph.dangling, dtype=torch.int32, device=device)
    return DeviceEdges(src, dst, graph.num_nodes, shares, goes_on, float(degree.max()))
