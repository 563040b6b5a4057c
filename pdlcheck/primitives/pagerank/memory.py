"""The memory that a graph takes, the memory that is free, and the error if a graph does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdlcheck.control_groups import control_groups

if TYPE_CHECKING:
    from pdlcheck.primitives.pagerank.graph import Graph

__all__ = [
    "COO",
    "CSR",
    "DENSE",
    "DEVICE_VECTORS",
    "HOST",
    "MESSAGES",
    "SORTED",
    "Peak",
    "free_memory",
    "gathered_nbytes",
    "graph_nbytes",
    "many_nbytes",
    "rank_nbytes",
    "require_free_memory",
    "solver_nbytes",
    "vectors_nbytes",
]

SMALL = 1 << 26
LARGE, MOST = 1 << 60, 1 << 1000  # a file may contain any number
UNLIMITED = 1 << 60  # without a limit, cgroup v1 shows a larger number

_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def graph_nbytes(num_edges: int, *, weighted: bool = False, id_nbytes: int = 8) -> int:
    """Return the bytes of a :class:`Graph`: two ids of ``id_nbytes`` per edge, and its weight if edges have weights."""
    return num_edges * (2 * id_nbytes + (8 if weighted else 0))


def solver_nbytes(num_nodes: int, num_edges: int, *, weighted: bool = False) -> int:
    """Return the peak bytes of :func:`pagerank` beside the graph: the layout of the edges, and vectors over nodes."""
    return num_nodes * 120 + num_edges * (40 if weighted else 8)


@dataclass(frozen=True)
class Peak:
    """The peak bytes of one way to store the edges and run the rounds with it: measured, plus a tenth."""

    per_node: int
    per_edge: int
    per_weighted_edge: int

    def nbytes(self, graph: Graph) -> int:
        """Return the peak bytes for ``graph``."""
        per_edge = self.per_edge if graph.weights is None else self.per_weighted_edge
        return graph.num_nodes * self.per_node + graph.num_edges * per_edge


MESSAGES = Peak(100, 20, 34)  # DGL's graph
CSR = Peak(90, 24, 30)  # scipy's matrix, then torch's
COO = Peak(90, 92, 92)
DENSE = Peak(0, 36, 38)  # in addition to the matrix
SORTED = Peak(160, 64, 82)  # on a device: the edges, and the vectors of the rounds
HOST = Peak(48, 16, 40)  # on the host, while the edges go to another device
DEVICE_VECTORS = 24  # bytes per node for each vector that is given


def vectors_nbytes(num_nodes: int, given: int) -> int:
    """Return the bytes of :func:`pagerank` on a graph with a layout, for ``given`` vectors as arguments."""
    return num_nodes * (61 + 14 * given)


def many_nbytes(num_nodes: int, num_vectors: int) -> int:
    """Return the bytes of :func:`pagerank_many` on a graph with a layout."""
    return num_nodes * (1200 + 16 * num_vectors)


def rank_nbytes(own_nodes: int, num_nodes: int, num_edges: int, given: int, *, weighted: bool = False) -> int:
    """Return the bytes that a rank of :func:`pagerank_over_ranks` takes in addition to the edges that it was given.

    Args:
        own_nodes: the number of nodes of this rank.
        num_nodes: the number of all nodes.
        num_edges: the number of edges that the rank handles: those that it was given, those that leave its nodes, and
            those that enter them.
        given: the number of vectors over all nodes that it was given.
        weighted: whether edges have weights.
    """
    ids = 1 if num_nodes <= 2**31 else 2
    return own_nodes * 160 + num_nodes * 16 * given + num_edges * (34 * ids + (26 if weighted else 0))


def gathered_nbytes(num_nodes: int, longest: int, world_size: int) -> int:
    """Return the bytes that a rank of :func:`gather_scores` takes; the longest shard has ``longest`` nodes."""
    return num_nodes * 8 + longest * 8 * (world_size + 1)


def require_free_memory(what: str, nbytes: int, cure: str, *, free: int | None = None) -> None:
    """Raise MemoryError if ``nbytes`` are not free: ``{what} needs ... GiB, ... GiB are free; {cure}``.

    ``free`` is the free memory of another device; ``None`` means the result of :func:`free_memory`. That is not called
    for less than 64 MB, because it takes longer than the ranking of a small graph.
    """
    if nbytes < SMALL and free is None:
        return
    free = free_memory() if free is None else free
    if free is not None and nbytes > free:
        needed = f"{nbytes / 2**30:.1f}" if nbytes < LARGE else f"{min(nbytes, MOST) / 2**30:.0e}"
        raise MemoryError(f"{what} needs {needed} GiB, {free / 2**30:.1f} GiB are free; {cure}")


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can still get; ``None`` if the system has no ``/proc``.

    This is the free memory of the system, or less if the control group of the process has a limit. Page cache counts as
    free. ``root`` is the folder that contains ``proc`` and ``sys``.
    """
    found = [_available(root / "proc/meminfo"), *map(_left, control_groups("memory", root))]
    known = [nbytes for nbytes in found if nbytes is not None]
    return max(0, min(known)) if known else None


def _available(meminfo: Path) -> int | None:
    sizes = _fields(meminfo)
    return sizes["MemAvailable:"] * 1024 if "MemAvailable:" in sizes else None


def _left(group: Path) -> int | None:
    """Return the bytes left in a control group, whose files are those of version 2 or 1; ``None`` without a limit."""
    for limit, usage, cache in _LIMITS:
        most, used = _number(group / limit), _number(group / usage)
        if most is not None and used is not None and most < UNLIMITED:
            return most - used + _fields(group / "memory.stat").get(cache, 0)
    return None


def _number(path: Path) -> int | None:
    """Return the number in a file of one number; ``None`` for ``max``, or if there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _fields(path: Path) -> dict[str, int]:
    """Return the lines ``name number ...`` of a file as a dict."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
