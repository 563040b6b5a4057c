"""Backward passes of simulated ranks: the engine detects when a pass ends, and keeps two passes out of one parameter.

torch locks a parameter while its gradient is accumulated, hooks included. A rank whose hook communicates gives up its
turn inside that lock. Another rank that comes to the same parameter would wait in C++, where no rank could wake it. The
same happens if the garbage collector runs in a hook of a DDP and frees that DDP. A failed test may leave a DDP as
garbage on a model that lives on.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pdlcheck.compat.torch.autograd import ImperativeEngine
from pdlcheck.errors import Unsupported
from pdlcheck.worlds.observe import user_line
from pdlcheck.worlds.simulated.process_state.device_streams import in_use
from pdlcheck.worlds.simulated.scheduling.scheduler import current_rank

__all__ = ["Engine"]

# the class of nodes that hold a leaf; C++ makes it when it first passes such a node to Python
_AccumulateGrad: Any = type(get_gradient_edge(torch.ones(1, requires_grad=True)).node)
_accumulating: dict[Any, int] = {}  # the node of a parameter -> the rank whose pass is under way
_passes = 0  # the number of passes under way on all ranks
_collects = False  # whether the garbage collector was enabled before the first of them


class Engine(ImperativeEngine):  # type: ignore[misc]  # torch's class, by its private name
    """Autograd's engine, as torch's Python code calls it."""

    def run_backward(self, tensors: Sequence[Tensor | GradientEdge], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass. On a rank, it holds the parameters whose gradients it accumulates.

        Raises:
            Unsupported: the pass of another rank holds one of the parameters.
        """
        rank = current_rank()
        if rank is None:
            return super().run_backward(tensors, *args, **kwargs)
        taken = _take(rank.rank, _leaves(tensors)) if kwargs.get("accumulate_grad") else ()
        for observe in rank.engine.events.accumulates:
            for node in taken:
                observe(rank.rank, node.variable)
        try:
            with _without_collector(), _in_this_thread():
                return super().run_backward(tensors, *args, **kwargs)
        finally:
            for node in taken:
                del _accumulating[node]
            for observe in rank.engine.events.backward_ended:
                observe(rank.rank)


def _in_this_thread() -> Any:
    """Return a context in which the backward pass stays in this thread.

    torch has one thread for each CUDA device, in which it goes backward. All ranks would wait for each other in it.
    """
    return torch.autograd.set_multithreading_enabled(False) if in_use() else nullcontext()


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable the garbage collector until the passes of all ranks have ended."""
    global _passes, _collects
    if not _passes:
        _collects = gc.isenabled()
        gc.disable()
    _passes += 1
    try:
        yield
    finally:
        _passes -= 1
        if not _passes and _collects:
            gc.enable()


def _take(rank: int, leaves: set[Any]) -> set[Any]:
    """Hold parameters for a pass of this rank, and return those that no other pass of the rank holds yet.

    A pass may start another pass.

    Raises:
        Unsupported: another rank holds one.
    """
    free = leaves - _accumulating.keys()
    if len(free) < len(leaves):
        for node in leaves - free:
            if (other := _accumulating[node]) != rank:
                raise Unsupported(
                    f"rank {rank} computes the gradient of a tensor of shape {tuple(node.variable.shape)} at "
                    f"{user_line()}, and so does rank {other}: simulated ranks share module globals, while a process "
                    "would have its own; make the model in the function that the ranks run"
                )
    _accumulating.update(dict.fromkeys(free, rank))
    return free


def _leaves(roots: Sequence[Tensor | GradientEdge]) -> set[Any]:
    """Return the nodes at which a pass from ``roots`` accumulates gradients, one for each leaf that it reaches."""
    nodes: list[Any] = []
    for root in roots:
        if isinstance(root, GradientEdge):
            nodes.append(root.node)
        elif root.requires_grad:  # otherwise torch raises an error
            nodes.append(root.grad_fn or get_gradient_edge(root).node)
    seen = set(nodes)
    for node in nodes:  # the list grows meanwhile
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return {node for node in seen if type(node) is _AccumulateGrad}
