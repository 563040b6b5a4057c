"""Kernels recorded once and launched together, because a round on a small graph costs as much as its launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Advance", "recorded"]

Advance = Callable[[], None]


def recorded(advance: Advance) -> Advance:
    """Return a function that repeats the launches of ``advance`` as one launch.

    This call only records: it calls ``advance``, but its kernels do not run. They must have run before, and must use
    the same tensors each time.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        advance()
    return graph.replay
