"""The reader of the METIS format: line i lists the neighbours of node i."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdlcheck.primitives.pagerank.files.columns import Columns, GrowingColumns, Progress
from pdlcheck.primitives.pagerank.files.source import Source
from pdlcheck.primitives.pagerank.files.text import blocks_of, shown
from pdlcheck.primitives.pagerank.memory import require_free_memory, solver_nbytes
from pdlcheck.primitives.pagerank.node_ids import NodeIds

__all__ = ["read_metis"]


@dataclass(frozen=True)
class _Header:
    num_nodes: int
    num_edges: int
    skipped: int  # numbers of a line before its neighbours: the size and the weights of the node
    weighted: bool


def read_metis(source: Source, weights: bool | None, progress: Progress | None) -> tuple[Columns, str]:
    """Return the edges and a description; all nodes have names, the numbers from 1.

    The first line is ``nodes edges [format [weights of a node]]``. Each edge is in the lines of both its nodes.

    Raises:
        ValueError: a line is wrong; the message has its number. Or there are more or fewer nodes or edges than the
            first line says.
        MemoryError: the edges or nodes do not fit in memory.
    """
    header, growing = None, GrowingColumns(source.name)
    node = number = listed = 0
    src, dst, values = [], [], []  # type: tuple[list[int], list[NDArray[np.int64]], list[NDArray[np.float64]]]
    for block in blocks_of(source):
        first = node
        for line in block[:-1].split(b"\n"):
            number += 1
            if line.startswith(b"%"):
                continue
            where = f"{source.name}:{number}"
            if header is None:
                if line.strip():
                    header = _header(where, line)
                continue
            if node == header.num_nodes:
                if line.strip():
                    raise ValueError(f"{where}: the first line says {node} nodes, here is one more; correct it")
                continue
            neighbours, weights_of_line = _neighbours(where, line, header)
            node += 1
            src.append(len(neighbours))
            dst.append(neighbours)
            values.append(weights_of_line)
        if header is not None and node > first:
            ends = np.repeat(np.arange(first, node), src), np.concatenate(dst)
            kept = np.concatenate(values) if header.weighted and weights is not False else None
            growing.add(*ends, kept, node - 1 if not len(ends[1]) else max(node - 1, int(ends[1].max())), source.share)
            listed += len(ends[1])
            src, dst, values = [], [], []
        if progress is not None:
            progress(source.position, source.total)
    if header is None:
        raise ValueError(f"{source.name} holds no line `nodes edges`; get it again")
    if weights and not header.weighted:
        raise ValueError(f"{source.name} has no weights of edges; leave out --weights (weights=None)")
    if node < header.num_nodes:
        raise ValueError(
            f"{source.name}:{number}: the first line says {header.num_nodes} nodes, here are {node}; the file may be "
            "truncated, get it again"
        )
    if listed != 2 * header.num_edges:
        raise ValueError(
            f"{source.name}: the first line says {header.num_edges} edges, so {2 * header.num_edges} neighbours, here "
            f"are {listed}; each edge stands in the lines of both nodes"
        )
    kept_too = "weights of edges" if header.weighted and weights is not False else "no weights"
    names = NodeIds(np.arange(1, header.num_nodes + 1))
    return growing.columns(names), f"METIS, nodes count from 1, {kept_too}"


def _header(where: str, line: bytes) -> _Header:
    fields = line.split()
    if not 2 <= len(fields) <= 4 or not all(field.isdigit() for field in fields):
        raise ValueError(
            f"{where}: the first line must be `nodes edges [format [weights of a node]]`, it is {shown(line)}; where "
            "lines are edges, pass --format text"
        )
    form = fields[2].decode().rjust(3, "0") if len(fields) > 2 else "000"
    if len(form) > 3 or not set(form) <= {"0", "1"}:
        raise ValueError(f"{where}: the format must be three digits 0 or 1, it is {form!r}; correct it")
    per_node = int(fields[3]) if len(fields) > 3 else 1
    nodes, edges = int(fields[0]), int(fields[1])
    if nodes == 0:
        raise ValueError(f"{where}: the first line says 0 nodes, a graph has one at least; get the file again")
    what = f"{where}: ranking {2 * edges} edges between {nodes} nodes"
    require_free_memory(what, solver_nbytes(nodes, 2 * edges), "use a machine with more memory")
    return _Header(nodes, edges, (form[0] == "1") + (form[1] == "1") * per_node, form[2] == "1")


def _neighbours(where: str, line: bytes, header: _Header) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    fields = line.split()[header.skipped :]
    if header.weighted and len(fields) % 2:
        raise ValueError(f"{where}: neighbours and weights must take turns, here are {len(fields)} fields; complete it")
    step = 2 if header.weighted else 1
    try:
        nodes = np.array(fields[::step], np.int64) - 1
        weights = np.array(fields[1::2] if header.weighted else [], np.float64)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{where}: {error}; the line is {shown(line)}") from error
    if nodes.size and not (nodes.min() >= 0 and nodes.max() < header.num_nodes):
        wrong = int(nodes[(nodes < 0) | (nodes >= header.num_nodes)][0]) + 1
        raise ValueError(f"{where}: node {wrong} must be from 1 to {header.num_nodes}; the line is {shown(line)}")
    if weights.size and not (np.isfinite(weights).all() and weights.min() >= 0):
        raise ValueError(
            f"{where}: a weight is negative or not finite; --no-weights (weights=False) leaves weights out; the line "
            f"is {shown(line)}"
        )
    return nodes, weights
