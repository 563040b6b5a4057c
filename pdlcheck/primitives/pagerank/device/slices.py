"""The layout of in-edges for a GPU: rows by descending in-degree, cut into slices, one per thread block.

A slice is stored step by step, with one entry of each of its rows per step, so that neighbouring threads read
neighbouring ids. Rows are sorted, so the rows of a slice have about equal length. Long rows are stored row by row
before all others and are cut into chunks. The sums of their chunks are again laid out as slices.

Source: sliced ELLPACK, Monakov, Lokhmotov and Avetisyan, "Automatically tuning sparse matrix-vector multiplication for
GPU architectures", HiPEAC 2010.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdlcheck.primitives.pagerank.device.edges import DeviceEdges

__all__ = ["BLOCK", "Slices", "cut_into_slices"]

BLOCK = 64  # rows in a slice
LONG = 128  # a row with more entries is summed in chunks
CHUNK = 512  # entries in a chunk
MOST_CHUNKS = 1024  # chunks of one row; a longer row has longer chunks


@dataclass(frozen=True, eq=False)
class Slices:
    """The rows of a graph, padded with empty ones to whole slices.

    A place without an edge has the last row, which is padding, as its source.

    Args:
        node: int64, the node of each row that is not padding.
        num_rows: the number of rows, padding included.
        long_slices: the number of slices that sum chunks; they come first.
        first_step, end_step: int64, one per slice: the begin and the end of its steps of BLOCK places. For the first
            ``long_slices`` slices these are places in the sums of chunks, for the others in ``sources``.
        chunk_begin: int64, the place in ``sources`` where each chunk begins, and the end of the last one.
        chunk_place: int64, the place of each chunk's sum in the sums of chunks, which have ``num_sums`` places.
        longest_chunk: the largest number of entries of a chunk.
        sources: the source row of each place, int32 if rows fit.
        shares: float64, the share of each place; None if the edges of a node have equal shares.
        out_degree: int32, one per row as in DeviceEdges; 1 for padding.
        share_error, num_edges: as in Sweep.
    """

    node: Tensor
    num_rows: int
    long_slices: int
    first_step: Tensor
    end_step: Tensor
    chunk_begin: Tensor
    chunk_place: Tensor
    num_sums: int
    longest_chunk: int
    sources: Tensor
    shares: Tensor | None
    out_degree: Tensor
    share_error: float
    num_edges: int


def cut_into_slices(edges: DeviceEdges) -> Slices:
    """Return the layout of ``edges``, made on their device.

    The order of the edges decides the order of the entries in a row.
    """
    n, device = edges.num_nodes, edges.src.device
    in_degree = torch.bincount(edges.dst, minlength=n)
    node = torch.argsort(in_degree, descending=True, stable=True)
    num_rows = (n // BLOCK + 1) * BLOCK  # at least one row of padding
    ids = torch.int32 if num_rows < 2**31 else torch.int64
    row = torch.empty(n, dtype=ids, device=device)
    row[node] = torch.arange(n, dtype=ids, device=device)
    degree = torch.zeros(num_rows, dtype=torch.int64, device=device)
    degree[:n] = in_degree[node]
    longest = degree[::BLOCK]  # entries of the longest row of each slice
    long_slices = int((longest > LONG).sum())
    long_rows = long_slices * BLOCK

    chunk = CHUNK * max(1, -(-int(degree[0]) // (CHUNK * MOST_CHUNKS)))
    chunks = (degree[:long_rows] + chunk - 1) // chunk
    chunk_row, number = _spread(chunks)
    sum_first, sum_end = _ranges(chunks[::BLOCK])
    begins = _before(degree)
    in_chunks = int(degree[:long_rows].sum())
    chunk_begin = torch.cat([begins[chunk_row] + number * chunk, begins.new_tensor([in_chunks])])
    chunk_place = (sum_first[chunk_row // BLOCK] + number) * BLOCK + chunk_row % BLOCK

    steps_before = -(-in_chunks // BLOCK)
    first, end = (steps + steps_before for steps in _ranges(longest[long_slices:]))
    places = BLOCK * (int(end[-1]) if len(end) else steps_before)

    key, order = torch.sort(row[edges.dst], stable=True)
    place = torch.arange(len(key), device=device)
    sliced = key[in_chunks:].long()
    step = first[sliced // BLOCK - long_slices] + place[in_chunks:] - begins[sliced]
    place[in_chunks:] = step * BLOCK + sliced % BLOCK
    del key, sliced, step
    sources = torch.full((places,), num_rows - 1, dtype=ids, device=device)
    sources[place] = row[edges.src][order]
    shares = None
    if edges.shares is not None:
        shares = torch.zeros(places, dtype=torch.float64, device=device)
        shares[place] = edges.shares[order]
    out_degree = torch.ones(num_rows, dtype=torch.int32, device=device)
    out_degree[:n] = edges.out_degree[node]
    return Slices(
        node=node,
        num_rows=num_rows,
        long_slices=long_slices,
        first_step=torch.cat([sum_first, first]),
        end_step=torch.cat([sum_end, end]),
        chunk_begin=chunk_begin,
        chunk_place=chunk_place,
        num_sums=BLOCK * int(chunks[::BLOCK].sum()),
        longest_chunk=chunk,
        sources=sources,
        shares=shares,
        out_degree=out_degree,
        share_error=edges.share_error,
        num_edges=len(order),
    )


def _before(counts: Tensor) -> Tensor:
    """Return the sum of all counts before each one."""
    return counts.cumsum(0) - counts


def _ranges(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the begin and the end of each of consecutive ranges, whose lengths are ``counts``."""
    end = counts.cumsum(0)
    return end - counts, end


def _spread(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each of ``sum(counts)`` items the index of its count, and its number within that count."""
    owner = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    return owner, torch.arange(len(owner), device=counts.device) - _before(counts)[owner]
