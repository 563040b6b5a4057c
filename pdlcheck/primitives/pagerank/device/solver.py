"""Rounds on a device until the true error is small enough; the host checks it every eight rounds.

A round is a few kernels of microseconds each. If the host read the step after each round, the device would wait for it.
So the device works ahead. The bound is that of :func:`pagerank`, from the last of the eight rounds. Up to seven rounds
are more than needed.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from pdlcheck.primitives.pagerank.device.csr import CsrMatrix, CsrSweep
from pdlcheck.primitives.pagerank.device.edges import edges_on
from pdlcheck.primitives.pagerank.device.replay import Advance, recorded
from pdlcheck.primitives.pagerank.device.sweep import Problem, Sweep, unit_of
from pdlcheck.primitives.pagerank.graph import Float64, Graph
from pdlcheck.primitives.pagerank.progress import RoundProgress, unheard

__all__ = ["CHECK_EVERY", "DeviceRounds", "Kernel", "Solution", "is_on_device", "solve_on_device", "sweep_of"]

Kernel = Literal["auto", "csr", "triton"]

CHECK_EVERY = 8  # rounds; even, so that the two vectors of sent values are back in their places
LAUNCH_BOUND = 1 << 23  # edges; a round over fewer takes less time than its launches
TINY = 2.0**-126  # the largest error of a float32 below its range of normal numbers, if a device sets those to 0


class Solution(NamedTuple):
    """The scores per node, the number of rounds, the bound on the L1 error, and whether that is at most ``tol``."""

    scores: Float64
    iterations: int
    error_bound: float
    converged: bool


def solve_on_device(
    graph: Graph,
    device: torch.device,
    kernel: Kernel,
    damping: float,
    tol: float,
    max_iter: int,
    teleport: Float64,
    landing: Float64,
    first: Float64,
    *,
    progress: RoundProgress = unheard,
    start_in: torch.dtype | None = None,
) -> Solution:
    """Rank the nodes of a graph that has nodes; :func:`pagerank` has checked the arguments.

    Args:
        graph: the graph, with one node at least.
        device: the device of the rounds.
        kernel: ``"triton"``, ``"csr"``, or ``"auto"``: ``"triton"`` on CUDA if it is installed, else ``"csr"``.
        damping: d, in [0, 1).
        tol: the largest true L1 error allowed.
        max_iter: the largest number of rounds.
        teleport: v, one number per node, sum 1.
        landing: w, in the same form.
        first: the start vector, in the same form.
        progress: called with the number of rounds and the bound: with 0 and infinity when the edges are on the device,
            then each time that the bound is known.
        start_in: the dtype of the values that nodes send at first. ``torch.float32`` halves the memory to read from,
            and is replaced by float64 when its rounding shows; ``None`` means float32 from eight million edges on.

    Raises:
        MemoryError: the edges do not fit.
        ImportError: ``kernel="triton"`` without Triton.
        ValueError: ``kernel="triton"`` on a device that it cannot use.
    """
    with _current(device):
        problem = Problem(damping, *(torch.tensor(v, dtype=torch.float64, device=device) for v in (teleport, landing)))
        sweep = sweep_of(graph, problem, kernel)
        if start_in is None:
            start_in = torch.float32 if graph.num_edges >= LAUNCH_BOUND else torch.float64
        start = torch.tensor(first, dtype=torch.float64, device=device)
        rounds = DeviceRounds(sweep, damping, start, math.fsum(first[graph.dangling]), start_in)
        progress(0, math.inf)
        bound, converged = rounds.run(tol, max_iter, progress)
        scores: Float64 = np.asarray(sweep.nodes_of(rounds.scores).cpu().numpy(), np.float64)
    return Solution(scores, rounds.iteration, bound, converged)


def sweep_of(graph: Graph, problem: Problem, kernel: Kernel) -> Sweep:
    """Return the rounds of ``problem`` on its device.

    The first call for a graph, device and kernel lays out the edges; later calls reuse the layout.
    """
    device = problem.teleport.device  # including its index
    if kernel == "auto":
        kernel = "triton" if device.type == "cuda" and find_spec("triton") is not None else "csr"
    layouts: dict[tuple[str, str], Any] = vars(graph).setdefault("_device_layouts", {})
    key = str(device), kernel
    if kernel == "csr":
        if key not in layouts:
            layouts[key] = CsrMatrix(edges_on(graph, device))
        return CsrSweep(layouts[key], problem)
    from pdlcheck.primitives.pagerank.device.launches import SlicedSweep, require_triton_device  # Triton is optional
    from pdlcheck.primitives.pagerank.device.slices import cut_into_slices

    require_triton_device(device)
    if key not in layouts:
        layouts[key] = cut_into_slices(edges_on(graph, device))
    return SlicedSweep(layouts[key], problem)


def is_on_device(graph: Graph, device: torch.device) -> bool:
    """Return whether the edges are laid out on a device of that type."""
    return any(torch.device(where).type == device.type for where, _ in vars(graph).get("_device_layouts", {}))


class DeviceRounds:
    """The iteration on a device. ``scores`` is float64, one per row of the sweep."""

    def __init__(
        self, sweep: Sweep, damping: float, start: torch.Tensor, dangling_mass: float, dtype: torch.dtype
    ) -> None:
        self._sweep, self._damping = sweep, damping
        self.scores = sweep.rows_of(start)
        self._totals = sweep.no_totals(dangling_mass)
        self._send_in(dtype)
        self.iteration = 0

    def run(self, tol: float, max_iter: int, progress: RoundProgress = unheard) -> tuple[float, bool]:
        """Run rounds until the error bound is at most ``tol``, if possible; return it, and whether it is."""
        before = math.inf  # the step at the last check; exact steps shrink by the factor damping in each round
        while True:
            rounds = min(CHECK_EVERY, max_iter - self.iteration)
            self._go(rounds)
            self.iteration += rounds
            step, bound, lost = self._judge()
            progress(self.iteration, bound)
            if bound <= tol or self.iteration == max_iter:
                return bound, bound <= tol
            single = self._sent.dtype is torch.float32
            stays = step > before * (1 + self._damping**CHECK_EVERY) / 2  # for example, rounding repeats in a cycle
            before = step
            if stays or self._damping * step <= lost * (4 if single else 1 / 16):  # the step is round-off
                if not single:
                    return bound, False
                self._send_in(torch.float64)
                before = math.inf

    def _judge(self) -> tuple[float, float, float]:
        """Return the last step, the bound on the error, and the most that rounding may have added in one round.

        The call waits for the device. A round rounds each term a few times (less than 16), and the sums as the sweep's
        ``rounding`` describes.
        """
        step, _, gathered, mass = self._totals.sum(1).tolist()
        sweep, damping, dtype = self._sweep, self._damping, self._sent.dtype
        rounding = sweep.rounding(dtype)
        lost = unit_of(torch.float64) * (16 + sweep.share_error + sweep.chain * mass)
        lost += rounding.per_addition * gathered + damping * rounding.per_term
        if dtype is torch.float32:
            lost += damping * sweep.num_edges * TINY
        bound = (damping * step * (1 + 1e-9) + lost) / (1 - damping)  # 1e-9: the round-off of step itself
        return step, bound, lost

    def _send_in(self, dtype: torch.dtype) -> None:
        self._sent = self._sweep.sent(self.scores, dtype)
        self._sent_next = torch.empty_like(self._sent)
        self._replay: Advance | None = None
        self._warm = False

    def _go(self, rounds: int) -> None:
        if rounds < CHECK_EVERY or not self._sweep.replayable or self._sweep.num_edges >= LAUNCH_BOUND:
            self.advance(rounds)
        elif not self._warm:  # the first rounds load the kernels, which a recording does not allow
            self.advance(rounds)
            self._warm = True
        else:
            self._replay = self._replay or recorded(lambda: self.advance(CHECK_EVERY))
            self._replay()

    def advance(self, rounds: int) -> None:
        """Launch ``rounds`` rounds without waiting for them."""
        for _ in range(rounds):
            self._sweep(self.scores, self._sent, self._sent_next, self._totals)
            self._sent, self._sent_next = self._sent_next, self._sent


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
