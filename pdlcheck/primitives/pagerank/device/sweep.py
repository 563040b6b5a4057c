"""The interface of a round that the solver needs, for every implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Problem", "Rounding", "Sweep", "unit_of"]


def unit_of(dtype: torch.dtype) -> float:
    """Return the largest relative error of one rounding: half the distance from 1 to the next number."""
    return float(torch.finfo(dtype).eps) / 2


@dataclass(frozen=True, eq=False)
class Problem:
    """The numbers d, v and w of ``x = (1 - d) v + d (P x + m w)``; vectors are float64, one number per node, sum 1."""

    damping: float
    teleport: Tensor
    landing: Tensor


class Rounding(NamedTuple):
    """The largest relative error of a row sum: ``per_addition * additions + per_term``."""

    per_addition: float
    per_term: float


class Sweep(Protocol):
    """A round over all rows of a graph. Rows are its nodes in an order that the sweep chooses, perhaps with padding.

    ``chain`` is the largest number of additions on the way of a term of the dangling mass. ``share_error`` is the
    number of roundings of a share. ``num_edges`` is the number of terms of all rows. ``replayable`` is True if the
    launches of a round can be recorded.
    """

    chain: float
    share_error: float
    num_edges: int
    replayable: bool

    def rounding(self, dtype: torch.dtype) -> Rounding:
        """Return the round-off of the sums of a round in which nodes send numbers of ``dtype``."""
        ...

    def rows_of(self, per_node: Tensor) -> Tensor:
        """Return one float64 per node as one per row, with 0 for padding."""
        ...

    def nodes_of(self, per_row: Tensor) -> Tensor:
        """Return one number per row as one per node."""
        ...

    def sent(self, scores: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the value that each row sends along an edge."""
        ...

    def no_totals(self, dangling_mass: float) -> Tensor:
        """Return the totals before the first round."""
        ...

    def __call__(self, scores: Tensor, sent: Tensor, sent_next: Tensor, totals: Tensor) -> None:
        """Run one round: read ``sent``, update ``scores`` in place, write ``sent_next`` and ``totals``; do not wait.

        The rows of ``totals`` (float64) sum to the L1 step, the dangling mass after the round,
        ``sum(additions of the row * score)``, and the dangling mass before the round.
        """
        ...
