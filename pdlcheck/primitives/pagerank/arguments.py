"""Checks of the arguments that the PageRank functions share; each error has the argument, its value and the cure."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pdlcheck.primitives.pagerank.graph import Float64, Graph
from pdlcheck.primitives.pagerank.memory import require_free_memory

__all__ = ["distribution", "free_on", "require_damping", "require_device", "require_iterations", "require_memory"]


def require_damping(damping: float) -> float:
    """Return ``damping`` as a float; raise an error if it is not a number in [0, 1)."""
    if isinstance(damping, bool) or not isinstance(damping, int | float | np.number):
        raise TypeError(f"damping must be a number, got {damping!r}")
    if not 0 <= damping < 1:  # NaN fails too
        raise ValueError(f"damping must be in [0, 1), got {damping}; the usual value is 0.85")
    return float(damping)


def require_iterations(name: str, iterations: int) -> int:
    """Return ``iterations`` as an int; raise an error if it is not an integer of 1 or more."""
    if isinstance(iterations, bool) or not isinstance(iterations, int | np.integer):
        raise TypeError(f"{name} must be an int, got {iterations!r}")
    if iterations < 1:
        raise ValueError(f"{name} must be 1 or more, got {iterations}")
    return int(iterations)


def require_device(device: torch.device | str, dtype: torch.dtype) -> torch.device:
    """Return ``device`` as a torch.device of this machine.

    Raises:
        ValueError: this machine has no such device, or ``dtype`` is neither float32 nor float64.
    """
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be 'cpu', 'cuda' or another of this machine, got {device!r}") from error
    if found.type == "meta":
        raise ValueError(f"device is {str(device)!r}, whose tensors hold no numbers; use device='cpu'")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {str(device)!r}, but torch sees no CUDA device; use device='cpu'")
    return found


def require_memory(
    caller: str,
    nbytes: int,
    device: torch.device | str = "cpu",
    *,
    what: str = "a matrix",
    cure: str = "use pagerank_v1 or pagerank, which keep the graph sparse",
) -> None:
    """Raise MemoryError if ``nbytes`` for ``what`` do not fit on ``device``, before anything is allocated."""
    require_free_memory(f"{what} of {caller}", nbytes, cure, free=free_on(device))


def free_on(device: torch.device | str) -> int | None:
    """Return the bytes that torch can still get on a GPU; ``None`` for the CPU."""
    if torch.device(device).type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # for torch's next tensors
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + kept


def distribution(name: str, values: Any, graph: Graph) -> Float64:
    """Return ``values`` (an array, a dict, or ``None`` for uniform) as a vector over the nodes that sums to 1."""
    if values is None:
        return np.full(graph.num_nodes, 1 / max(graph.num_nodes, 1))
    vector = graph.vector(name, values)
    bad = np.flatnonzero(~(np.isfinite(vector) & (vector >= 0)))
    if bad.size:
        raise ValueError(f"{name} holds {vector[bad[0]]} at {bad[0]}; every value must be finite and not negative")
    if graph.num_nodes and not vector.any():
        raise ValueError(f"{name} is 0 everywhere; give at least one node a positive value, or pass None for uniform")
    if vector.size:
        vector = vector / vector.max()  # divide first, so that no sum overflows
        vector /= float(vector.sum(dtype=np.longdouble))
    return vector
