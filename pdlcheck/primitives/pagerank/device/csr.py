"""A round as torch operations: a product with a CSR matrix, on any device that torch supports it on."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from pdlcheck.primitives.pagerank.device.edges import DeviceEdges
from pdlcheck.primitives.pagerank.device.sweep import Problem, Rounding, unit_of

__all__ = ["CsrMatrix", "CsrSweep"]

SIDE = 1024  # terms per partial sum, so that a term of a long sum is rounded few times
INT32_MAX = 2**31 - 1


class CsrMatrix:
    """The edges as a CSR matrix: row = destination, column = source; 12 bytes per edge in float64.

    An edge that occurs twice is two entries. The sums of a row are computed in the dtype of the vector, in the order of
    the library behind torch.
    """

    def __init__(self, edges: DeviceEdges) -> None:
        n, device = edges.num_nodes, edges.src.device
        order = torch.argsort(edges.dst * n + edges.src, stable=True)
        ids = torch.int32 if max(n, len(order)) <= INT32_MAX else torch.int64
        self.in_degree = torch.bincount(edges.dst, minlength=n)
        # empty rows after those of the nodes: cuSPARSE accepts no matrix with more entries than places
        self._rows = max(n, -(-len(order) // n))
        self._begins = torch.full((self._rows + 1,), len(order), dtype=ids, device=device)
        self._begins[0] = 0
        self._begins[1 : n + 1] = self.in_degree.cumsum(0)
        self._columns = edges.src[order].to(ids)
        self.weighted = edges.shares is not None
        self._shares = (
            torch.ones(len(order), dtype=torch.float64, device=device) if edges.shares is None else edges.shares[order]
        )
        self.out_degree, self.share_error = edges.out_degree, edges.share_error
        self._matrices: dict[torch.dtype, Tensor] = {}

    @property
    def num_edges(self) -> int:
        """Return the number of edges."""
        return len(self._columns)

    def times(self, vector: Tensor) -> Tensor:
        """Return the product with ``vector``, in its dtype."""
        return torch.mv(self._of(vector.dtype), vector)[: len(self.in_degree)]

    def _of(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix with entries of ``dtype``, which the first call makes."""
        if dtype not in self._matrices:
            shape = (self._rows, len(self.in_degree))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Sparse (CSR tensor support|invariant checks)", UserWarning)
                self._matrices[dtype] = torch.sparse_csr_tensor(
                    self._begins, self._columns, self._shares.to(dtype), shape, check_invariants=False
                )
        return self._matrices[dtype]


class CsrSweep:
    """The rounds of one problem with a :class:`CsrMatrix`; row i is node i."""

    replayable = False  # the library may allocate memory, which a recording does not allow

    def __init__(self, matrix: CsrMatrix, problem: Problem) -> None:
        self._matrix, self._damping = matrix, problem.damping
        self._base = (1 - problem.damping) * problem.teleport
        self._landing = problem.landing
        degree = matrix.out_degree.double()
        self._out = torch.where(degree > 0, 1 / degree, 0.0)
        self._is_dangling = (degree == 0).double()
        self._additions = matrix.in_degree.double()
        self._longest = float(self._additions.max())
        n = len(degree)
        self.chain = min(n, 2 * SIDE + n / SIDE)
        self.share_error, self.num_edges = matrix.share_error, matrix.num_edges

    def rounding(self, dtype: torch.dtype) -> Rounding:
        """Return the round-off of the sums of a round; infinite if a row is too long for float32."""
        unit, longest = unit_of(dtype), self._longest
        if dtype is torch.float64:
            return Rounding(unit, 0.0)
        if longest * unit >= 1 / 64:
            return Rounding(float("inf"), 0.0)
        terms = 3 if self._matrix.weighted else 1  # the roundings of the sent value, the share, and their product
        return Rounding(unit / (1 - 2 * longest * unit), terms * unit)

    def rows_of(self, per_node: Tensor) -> Tensor:
        """Return a copy of ``per_node``, because row i is node i."""
        return per_node.clone()

    def nodes_of(self, per_row: Tensor) -> Tensor:
        """Return ``per_row`` itself, because row i is node i."""
        return per_row

    def sent(self, scores: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the value that each row sends along an edge."""
        return (scores * self._out).to(dtype)

    def no_totals(self, dangling_mass: float) -> Tensor:
        """Return the totals before the first round."""
        totals = torch.zeros(4, 1, dtype=torch.float64, device=self._out.device)
        totals[1] = dangling_mass
        return totals

    def __call__(self, scores: Tensor, sent: Tensor, sent_next: Tensor, totals: Tensor) -> None:
        """Run one round, as :class:`Sweep` describes."""
        before = totals[1].clone()
        arrived = self._matrix.times(sent).double()
        score = arrived * self._damping + self._base + self._landing * (self._damping * before)
        totals[0] = _long_sum((score - scores).abs())
        totals[1] = _long_sum(score * self._is_dangling)
        totals[2] = _long_sum(score * self._additions)
        totals[3] = before
        scores.copy_(score)
        sent_next.copy_(score * self._out)


def _long_sum(terms: Tensor) -> Tensor:
    whole = len(terms) - len(terms) % SIDE
    return terms[:whole].view(-1, SIDE).sum(1).sum() + terms[whole:].sum()
