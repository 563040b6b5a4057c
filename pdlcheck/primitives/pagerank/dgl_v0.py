"""The message passing of PageRank version 0. This is the one file that imports DGL."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from pdlcheck.extras import extra
from pdlcheck.primitives.pagerank.graph import Graph

_backend = os.environ.get("DGLBACKEND")
os.environ["DGLBACKEND"] = "pytorch"  # else the import writes a config file to the user's home and prints to stderr
try:
    with extra("dgl", "pagerank_v0, which runs on Python 3.11,"):
        import dgl
        import dgl.function as fn
finally:
    if _backend is None:
        del os.environ["DGLBACKEND"]
    else:
        os.environ["DGLBACKEND"] = _backend

__all__ = ["message_passing"]


def message_passing(graph: Graph, device: torch.device, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that sends node values, times edge weights, along the edges and sums them at each node."""
    src, dst = torch.tensor(graph.src), torch.tensor(graph.dst)
    try:
        nodes = dgl.graph((src, dst), num_nodes=graph.num_nodes).to(device)
    except dgl.DGLError as error:
        raise ValueError(
            f"device is '{device}', but this DGL cannot use it; use device='cpu', or a DGL built for CUDA"
        ) from error
    message = fn.copy_u("pv", "message")
    if graph.weights is not None:
        nodes.edata["weight"] = torch.from_numpy(graph.scaled_weights()).to(device, dtype)
        message = fn.u_mul_e("pv", "weight", "message")

    def send(values: torch.Tensor) -> torch.Tensor:
        nodes.ndata["pv"] = values
        nodes.update_all(message, fn.sum("message", "pv"))
        received: torch.Tensor = nodes.ndata["pv"]
        return received

    return send
