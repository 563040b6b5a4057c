"""What the solver needs of a round, whoever computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Problem", "Rounding", "Sweep", "unit_of"]


def unit_of(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number: what one rounding can be off, relative."""
    return float(torch.finfo(dtype).eps) / 2


@dataclass(frozen=True, eq=False)
class Problem:
    """``x = (1 - d) v + d (P x + m w)``: d, v and w; the vectors are float64, one number per node, sum 1."""

    damping: float
    teleport: Tensor
    landing: Tensor


class Rounding(NamedTuple):
    """How far the sum of a row can be off: ``per_addition * additions + per_term``, relative to it."""

    per_addition: float
    per_term: float


class Sweep(Protocol):
    """A round over all rows of a graph. Rows are its nodes in an order of the sweep's own, perhaps with padding.

    ``chain`` is the most additions that a term of the dangling mass goes through, ``share_error`` how often a share was
    rounded, ``num_edges`` how many terms all rows have, ``replayable`` whether the launches of a round can be recorded.
    """

    chain: float
    share_error: float
    num_edges: int
    replayable: bool

    def rounding(self, dtype: torch.dtype) -> Rounding:
        """What the sums of a round lose where nodes send numbers of ``dtype``."""
        ...

    def rows_of(self, per_node: Tensor) -> Tensor:
        """One float64 per node as one per row, 0 for padding."""
        ...

    def nodes_of(self, per_row: Tensor) -> Tensor:
        """The way back."""
        ...

    def sent(self, scores: Tensor, dtype: torch.dtype) -> Tensor:
        """What each row sends along an edge."""
        ...

    def no_totals(self, dangling_mass: float) -> Tensor:
        """Room for what a round reports, before the first one."""
        ...

    def __call__(self, scores: Tensor, sent: Tensor, sent_next: Tensor, totals: Tensor) -> None:
        """One round: read ``sent``, update ``scores`` in place, write ``sent_next`` and ``totals``; no waiting.

        The rows of ``totals`` (float64) sum to the L1 step, the dangling mass after the round,
        ``sum(additions of the row * score)``, and the dangling mass before.
        """
        ...
