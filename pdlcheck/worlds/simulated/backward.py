"""Backward passes of simulated ranks: when one has ended, and that no two of them meet in a parameter.

torch locks a parameter while its gradient is accumulated, hooks included. A rank whose hook communicates gives up its
turn there; another rank that came to the same parameter would wait in C++, where nobody could wake it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pdlcheck.errors import Unsupported
from pdlcheck.worlds.simulated.scheduler import current_rank
from pdlcheck.worlds.watch import user_line

__all__ = ["Engine"]

_accumulating: dict[int, tuple[int, Tensor]] = {}  # id of a parameter -> the rank whose pass is under way, and it


class Engine(torch._C._ImperativeEngine):
    """Autograd's engine, as torch's Python code calls it."""

    def run_backward(self, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        rank = current_rank()
        if rank is None:
            return super().run_backward(tensors, *args, **kwargs)
        try:
            with _alone(rank.rank, _parameters(tensors) if kwargs.get("accumulate_grad") else []):
                return super().run_backward(tensors, *args, **kwargs)
        finally:
            rank.network.after_backward(rank.rank)


@contextmanager
def _alone(rank: int, parameters: Sequence[Tensor]) -> Iterator[None]:
    for parameter in parameters:
        other, _ = _accumulating.get(id(parameter), (rank, None))
        if other != rank:
            raise Unsupported(
                f"rank {rank} computes the gradient of a tensor of shape {tuple(parameter.shape)} at {user_line()}, "
                f"and so does rank {other}: simulated ranks share module globals, while a process would have its own; "
                "make the model in the function that the ranks run"
            )
    mine = [parameter for parameter in parameters if id(parameter) not in _accumulating]  # a pass may start another
    _accumulating.update((id(parameter), (rank, parameter)) for parameter in mine)
    try:
        yield
    finally:
        for parameter in mine:
            del _accumulating[id(parameter)]


def _parameters(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The leaves that a pass from ``tensors`` reaches."""
    found = [tensor for tensor in tensors if tensor.grad_fn is None]
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        for node, _ in nodes.pop().next_functions:
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                found.append(node.variable)
            else:
                nodes.append(node)
    return found
