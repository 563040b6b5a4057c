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
    """The edges of a graph as tensors.

    Edge ``e`` goes from ``src[e]`` to ``dst[e]`` (int64) and has the share ``shares[e]`` of its source's score.
    ``shares`` (float64) is None if the edges of a node have equal shares; ``out_degree`` (int32, one per node) is then
    their number. Otherwise ``out_degree`` is 1, or 0 for a dangling node. ``share_error`` is the number of roundings of
    a share.
    """

    src: Tensor
    dst: Tensor
    num_nodes: int
    shares: Tensor | None
    out_degree: Tensor
    share_error: float


def require_room_on(device: torch.device, graph: Graph, given: int, *, laid_out: bool) -> None:
    """Raise MemoryError if ``device`` or the host has no room to rank ``graph``.

    Args:
        device: the device of the rounds.
        graph: the graph to rank.
        given: the number of vectors over the nodes that go to the device too.
        laid_out: whether the edges are there already.
    """
    cure = "use device='cpu' with kernel='auto', which takes less, or fewer edges"
    for where, peak in (("cpu", HOST), (device, SORTED)):
        nbytes = graph.num_nodes * (peak.per_node + DEVICE_VECTORS * given)
        if not laid_out:
            nbytes += peak.nbytes(graph) - graph.num_nodes * peak.per_node
        require_memory(f"pagerank on {device}", nbytes, where, what=f"ranking {graph}", cure=cure)


def edges_on(graph: Graph, device: torch.device) -> DeviceEdges:
    """Return the edges of ``graph`` as tensors on ``device``."""
    src = torch.tensor(graph.src, dtype=torch.int64, device=device)
    dst = torch.tensor(graph.dst, dtype=torch.int64, device=device)
    degree = torch.bincount(src, minlength=graph.num_nodes)
    weights = graph.weights
    if weights is None or (weights.size > 0 and weights.min() == weights.max() > 0):
        return DeviceEdges(src, dst, graph.num_nodes, None, degree.int(), 0.0)
    shares = torch.tensor(graph.probabilities, dtype=torch.float64, device=device)
    goes_on = torch.tensor(~graph.dangling, dtype=torch.int32, device=device)
    return DeviceEdges(src, dst, graph.num_nodes, shares, goes_on, float(degree.max()))
