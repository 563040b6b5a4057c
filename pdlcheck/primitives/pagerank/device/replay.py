"""Kernels recorded once and launched together: what a small graph's round costs is its launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Advance", "recorded"]

Advance = Callable[[], None]


def recorded(advance: Advance) -> Advance:
    """A function that repeats what ``advance`` launches, as one launch; ``advance`` itself runs nothing here.

    Its kernels must have run before, and use the same tensors each time.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        advance()
    return graph.replay
