"""A round as launches of the Triton kernels: the chunks of long rows, all rows, the totals."""

from __future__ import annotations

import torch
from torch import Tensor

from pdlcheck.primitives.pagerank.device.kernels import add_chunks, add_parts, interpreted, update_rows
from pdlcheck.primitives.pagerank.device.slices import BLOCK, CHUNK, Slices
from pdlcheck.primitives.pagerank.device.sweep import Problem, Rounding, unit_of

__all__ = ["SlicedSweep", "require_triton_device"]

STEPS = 8  # steps of a slice whose ids and values are loaded at the same time
MOST_GROUPS = 64  # thread blocks that sum the parts of all slices, LANES at a time
LANES = 256


def require_triton_device(device: torch.device) -> None:
    """Raise ValueError if the kernels cannot run on ``device``."""
    if device.type != "cuda" and not interpreted():
        raise ValueError(f"kernel='triton' needs device='cuda', got '{device}'; use kernel='csr' there")


class SlicedSweep:
    """The rounds of one problem on :class:`Slices`; row r is the node with the r-th most in-edges."""

    def __init__(self, slices: Slices, problem: Problem) -> None:
        self._slices, device = slices, slices.sources.device
        self._num_slices = slices.num_rows // BLOCK
        self.share_error, self.num_edges = slices.share_error, slices.num_edges
        self._groups = min(MOST_GROUPS, 1 << ((self._num_slices - 1) // LANES).bit_length())
        self.chain = float(BLOCK + -(-self._num_slices // (self._groups * LANES)) + LANES + self._groups)
        self.replayable = device.type == "cuda"
        teleport, landing = problem.teleport, problem.landing
        self._uniform = bool((teleport == teleport[0]).all()) and bool((landing == teleport[0]).all())
        factors = [problem.damping, 1 - problem.damping, float(teleport[0])]
        self._factors = torch.tensor(factors, dtype=torch.float64, device=device)
        self._teleport, self._landing = (
            (self._factors, self._factors) if self._uniform else (self.rows_of(teleport), self.rows_of(landing))
        )
        self._sums = torch.zeros(max(slices.num_sums, 1), dtype=torch.float64, device=device)
        self._parts = torch.zeros(3, self._num_slices, dtype=torch.float64, device=device)

    def rounding(self, dtype: torch.dtype) -> Rounding:
        """Return the round-off: sums are float64, and float32 rounds each sent number once."""
        return Rounding(unit_of(torch.float64), unit_of(dtype) if dtype is torch.float32 else 0.0)

    def rows_of(self, per_node: Tensor) -> Tensor:
        """Return one float64 per node as one per row, with 0 for padding."""
        rows = torch.zeros(self._slices.num_rows, dtype=torch.float64, device=per_node.device)
        rows[: len(self._slices.node)] = per_node[self._slices.node]
        return rows

    def nodes_of(self, per_row: Tensor) -> Tensor:
        """Return one number per row as one per node."""
        found = torch.empty(len(self._slices.node), dtype=torch.float64, device=per_row.device)
        found[self._slices.node] = per_row[: len(found)]
        return found

    def sent(self, scores: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the value that each row sends along an edge."""
        degree = self._slices.out_degree
        return torch.where(degree > 0, scores / degree.clamp(min=1), 0.0).to(dtype)

    def no_totals(self, dangling_mass: float) -> Tensor:
        """Return the totals before the first round."""
        totals = torch.zeros(4, self._groups, dtype=torch.float64, device=self._factors.device)
        totals[1, 0] = dangling_mass
        return totals

    def __call__(self, scores: Tensor, sent: Tensor, sent_next: Tensor, totals: Tensor) -> None:
        """Launch one round, as :class:`Sweep` describes."""
        slices, weighted = self._slices, self._slices.shares is not None
        shares = slices.sources if slices.shares is None else slices.shares  # a placeholder, not read
        if len(slices.chunk_place):
            add_chunks[len(slices.chunk_place),](
                *(slices.sources, shares, sent, slices.chunk_begin, slices.chunk_place, self._sums),
                WEIGHTED=weighted,
                LANES=CHUNK,
                num_warps=2,
                enable_fp_fusion=True,
            )
        update_rows[self._num_slices,](
            *(slices.sources, shares, self._sums, slices.first_step, slices.end_step, slices.long_slices),
            *(slices.longest_chunk, sent, slices.out_degree, len(slices.node), self._factors, self._teleport),
            *(self._landing, scores, sent_next, totals, self._parts, self._num_slices),
            WEIGHTED=weighted,
            UNIFORM=self._uniform,
            BLOCK=BLOCK,
            STEPS=STEPS,
            GROUPS=self._groups,
            num_warps=2,
            enable_fp_fusion=True,
        )
        add_parts[self._groups,](
            *(self._parts, totals, self._num_slices),
            GROUPS=self._groups,
            LANES=LANES,
            num_warps=4,
            enable_fp_fusion=True,
        )
