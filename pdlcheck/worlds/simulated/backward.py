"""Backward passes of simulated ranks: when one has ended, and that no two of them meet in a parameter.

torch locks a parameter while its gradient is accumulated, hooks included. A rank whose hook communicates gives up its
turn there; another rank that came to the same parameter would wait in C++, where nobody could wake it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pdlcheck.errors import Unsupported
from pdlcheck.worlds.simulated.scheduler import current_rank
from pdlcheck.worlds.watch import user_line

__all__ = ["Engine"]

# the class of nodes that hold a leaf: C++ makes it when it first shows one to Python
_AccumulateGrad: Any = type(torch.ones(1, requires_grad=True).expand_as(torch.ones(1)).grad_fn.next_functions[0][0])  # type: ignore[union-attr]
_accumulating: dict[int, tuple[int, Tensor]] = {}  # id of a parameter -> the rank whose pass is under way, and it


class Engine(torch._C._ImperativeEngine):
    """Autograd's engine, as torch's Python code calls it."""

    def run_backward(self, tensors: Sequence[Tensor | GradientEdge], *args: Any, **kwargs: Any) -> Any:
        rank = current_rank()
        if rank is None:
            return super().run_backward(tensors, *args, **kwargs)
        mine: list[Tensor] = []
        try:
            if kwargs.get("accumulate_grad"):
                _take(rank.rank, _parameters(tensors), mine)
            return super().run_backward(tensors, *args, **kwargs)
        finally:
            for parameter in mine:
                del _accumulating[id(parameter)]
            rank.network.after_backward(rank.rank)


def _take(rank: int, parameters: Sequence[Tensor], mine: list[Tensor]) -> None:
    """Hold parameters for a pass of this rank; add to ``mine`` what no pass of it held, as a pass may start another.

    Raises:
        Unsupported: another rank holds one.
    """
    for parameter in parameters:
        held = _accumulating.get(id(parameter))
        if held is None:
            _accumulating[id(parameter)] = rank, parameter
            mine.append(parameter)
        elif held[0] != rank:
            raise Unsupported(
                f"rank {rank} computes the gradient of a tensor of shape {tuple(parameter.shape)} at {user_line()}, "
                f"and so does rank {held[0]}: simulated ranks share module globals, while a process would have its "
                "own; make the model in the function that the ranks run"
            )


def _parameters(roots: Sequence[Tensor | GradientEdge]) -> list[Tensor]:
    """The leaves that a pass from ``roots`` reaches."""
    found: list[Any] = []
    nodes: list[Any] = []
    for root in roots:
        node = root.node if isinstance(root, GradientEdge) else root.grad_fn
        if node is None:
            found.append(root)
        elif type(node) is _AccumulateGrad:
            found.append(node.variable)
        else:
            nodes.append(node)
    seen = set(nodes)
    following: Any
    for node in nodes:  # which grows
        for following, _ in node.next_functions:
            if following is None or following in seen:
                continue
            seen.add(following)
            if type(following) is _AccumulateGrad:
                found.append(following.variable)
            else:
                nodes.append(following)
    return found
