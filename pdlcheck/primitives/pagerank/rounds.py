"""The rounds of the fast solver: sweeps over the edges, and a bound on how far they have come."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdlcheck.primitives.pagerank.gathering import LANES, NUM_SUMS
from pdlcheck.primitives.pagerank.graph import Float64
from pdlcheck.primitives.pagerank.kernels import TILE, sweep
from pdlcheck.primitives.pagerank.layout import Layout
from pdlcheck.primitives.pagerank.many_kernels import PART, sweep_many
from pdlcheck.primitives.pagerank.progress import RoundProgress, unheard
from pdlcheck.primitives.pagerank.threads import Team, ranges

__all__ = ["Rounds"]

UNIT = float(np.finfo(np.float64).eps) / 2
TINY = 2.0**-150  # what a float32 may be off below its range of normal numbers
CHUNKS = 16  # of a large graph: blocks swept at the same time; later ones read what earlier ones have found
BLOCKS_PER_CHUNK = 4  # at least, so that threads find work


@dataclass
class _System:
    """``y = to_base base + d (P y + m w)``, and where to begin: what nodes send, and the mass of dangling ones.

    ``lost``: the round-off in ``base``, whose L1 norm is ``size``. ``whole``, of sum ``total``: what y is added to.
    Numbers are one, or one for each of LANES vectors.
    """

    base: Float64
    to_base: float
    sent: NDArray[Any]
    mass: Any
    lost: Any = 0.0
    size: Any = 1.0
    whole: Float64 | None = None
    total: Any = 0.0


class Rounds:
    """``x = (1 - d) v + d (P x + m w)``, solved by sweeps that use each new score at once, or all of them later.

    **What bounds the error.** A sweep leaves the residual ``U (x - s)`` where s is what rows met before, and U the part
    of the matrix that met it; its columns sum to d at most, as those of the whole matrix do. So the true L1 error is at
    most ``(d |x - s| + round-off) / (1 - d)``. The kernel measures ``|x - s|`` against what was really sent, so
    rescaling and its rounding are in it.

    **Two precisions.** Large graphs are swept with what nodes send in float32: half the memory to read from at random.
    Where its rounding shows, one round in float64 finds the residual r of the scores so far, and the next sweeps solve
    ``y = r + d (P y + m w)`` for what is still missing, again in float32: its rounding is now relative to y. This is
    iterative refinement.

    Source: Wilkinson, "Rounding errors in algebraic processes" (1963), for refinement.
    """

    def __init__(
        self,
        layout: Layout,
        damping: float,
        teleport: Float64,
        landing: Float64,
        *,
        in_place: bool,
        progress: RoundProgress = unheard,
    ) -> None:
        self._progress = progress
        self._layout, self._damping = layout, damping
        self._teleport, self._landing = teleport, landing
        self._columns = teleport.shape[1:]  # none, or LANES vectors
        self._sweep_blocks = sweep_many if self._columns else sweep
        self._out = layout.out[:, None] if self._columns else layout.out
        blocks = layout.num_blocks
        self._single = blocks > 1
        self._chunks = ranges(blocks, max(1, min(CHUNKS, blocks // BLOCKS_PER_CHUNK)) if in_place else 1)
        self._at_once = in_place and blocks == 1
        self._parts = np.empty((blocks, NUM_SUMS, *self._columns))
        self._spare: dict[type, list[NDArray[Any]]] = {np.float32: [], np.float64: []}
        slices = int(np.diff(layout.bounds).max())
        # how often a term of a sum over rows is rounded: the slices of a tile, lanes, tiles of a block, blocks
        in_a_tile = min(TILE, slices) * (LANES if self._columns else 1)
        self._chain = in_a_tile + LANES + slices / TILE + blocks
        # and one of the longest sum of a row
        self._longest = PART + layout.longest * LANES // PART if self._columns else layout.longest + LANES
        self.iteration = 0

    def run(self, first: Float64, tol: float, max_iter: int, *, warm: bool) -> tuple[Float64, Any]:
        """Sweep from ``first`` until each bound is at most ``tol``, if it can be; the scores, and the bound of each."""
        with Team(self._layout.num_blocks) as self._team:
            self._rooms = [np.empty((2 + NUM_SUMS) * LANES) for _ in range(self._team.size)]
            scores, bound = first, np.full(self._columns, math.inf)
            if not (self._single and warm):
                sent = self._sent_by(first, np.float32 if self._single else np.float64)
                system = _System(self._teleport, 1 - self._damping, sent, self._dangling_mass(first))
                scores, bound = self._solve(system, tol, max_iter)
            while self._single and not np.all(bound <= tol) and self.iteration < max_iter:
                reached = bound
                scores, bound = self._refine(scores, tol, max_iter)
                if not np.any(bound < reached / 2):
                    break
        return scores, bound

    def _refine(self, scores: Float64, tol: float, max_iter: int) -> tuple[Float64, Any]:
        """One round in float64, then sweeps for what is still missing."""
        layout, damping = self._layout, self._damping
        self.iteration += 1
        sent, mass = self._sent_by(scores, np.float64), self._dangling_mass(scores)
        missing, missing_sent = self._rows(np.float64), self._rows(np.float32)
        self._sweep(0, layout.num_blocks, self._teleport, 1 - damping, mass, sent, scores, missing, missing_sent, 0)
        self._spare[np.float64].append(sent)
        step, missing_mass, change, _, weighted = self._sums()
        lost = UNIT * (weighted + layout.share_error + self._chain * mass + 4)
        total = scores.sum(axis=0)
        bound = (damping * step * (1 + 1e-9) + lost) / (1 - damping) + self._off(total + change)
        self._progress(self.iteration, float(np.max(bound)))
        if np.all((bound <= tol) | (damping * step <= lost / 16)) or self.iteration == max_iter:
            scores += missing
            scores /= total + change
            return scores, bound
        system = _System(missing, 1.0, missing_sent, missing_mass, lost, step, scores, total)
        found = self._solve(system, tol, max_iter)
        self._spare[np.float64] += [scores, missing]
        return found

    def _solve(self, system: _System, tol: float, max_iter: int) -> tuple[Float64, Any]:
        layout, damping = self._layout, self._damping
        sent, mass, whole = system.sent, system.mass, system.whole
        rounding = float(np.finfo(sent.dtype).eps) / 2
        found = self._rows(np.float64)
        largest = max(int(layout.bounds[b] - layout.bounds[a]) for a, b in self._chunks)
        fresh = sent if self._at_once else np.empty((largest * LANES, *self._columns), sent.dtype)
        if whole is not None:
            whole_sent = self._sent_by(whole, sent.dtype.type)
            whole_mass, due = self._dangling_mass(whole), system.base.sum(axis=0) / (1 - damping)
        while True:
            self.iteration += 1
            for first, last in self._chunks:
                begin, end = layout.bounds[first] * LANES, layout.bounds[last] * LANES
                place = 0 if self._at_once else begin
                self._sweep(first, last, system.base, system.to_base, mass, sent, None, found, fresh, place)
                if not self._at_once:
                    sent[begin:end] = fresh[: end - begin]
            step, new_mass, total, size, weighted = self._sums()
            if whole is None:
                lost = UNIT * (weighted + layout.share_error * size + self._chain * mass)
            else:  # terms of either sign: no sum bounds them, so count the longest one for each
                each = 16 + self._longest + layout.share_error + self._chain
                lost = UNIT * each * (size + step + system.size) + system.lost
            lost += damping * (rounding * size + len(layout.sources) * TINY)
            residual = damping * (step + abs(new_mass - mass)) * (1 + 1e-9)
            bound = (residual + lost) / (1 - damping) + self._off(system.total + total)
            self._progress(self.iteration, float(np.max(bound)))
            refinable = self._single & (lost > tol * (1 - damping) / 2)
            drowned = damping * step <= lost * np.where(refinable, 4, 1 / 16)  # the step is round-off
            if np.all((bound <= tol) | drowned) or self.iteration >= max_iter:
                if whole is not None:
                    found += whole
                found /= system.total + total
                self._spare[sent.dtype.type] += [sent] if whole is None else [sent, whole_sent]
                return found, bound
            if whole is None:
                sent *= 1 / total
                mass = new_mass / total
            else:
                sent += np.asarray(due - total, sent.dtype) * whole_sent
                mass = new_mass + (due - total) * whole_mass

    def _sweep(
        self,
        first: int,
        last: int,
        base: Float64,
        to_base: float,
        mass: Any,
        sent: NDArray[Any],
        before: Float64 | None,
        scores: Float64,
        fresh: NDArray[Any],
        first_fresh: int,
    ) -> None:
        layout, damping, counter = self._layout, self._damping, np.array([first])

        matrix = layout.bounds, layout.long_rows, layout.begins, layout.sources, layout.shares
        factors = damping, to_base, damping * mass
        earlier = None if before is None else before.reshape(-1)
        vectors = base.reshape(-1), self._landing.reshape(-1), layout.out, sent.reshape(-1), earlier, scores.reshape(-1)

        def work(member: int) -> None:
            own = fresh.reshape(-1), first_fresh, self._rooms[member], self._parts
            self._sweep_blocks(counter, last, *matrix, *factors, *vectors, *own)  # type: ignore[arg-type]

        self._team.run(work)

    def _sums(self) -> Any:
        """Of all blocks: step, dangling mass, total, absolute total, additions; one number each, or one per vector."""
        return self._parts.sum(axis=0)

    def _dangling_mass(self, scores: Float64) -> Any:
        return scores[self._layout.dangling].sum(axis=0)

    def _sent_by(self, scores: Float64, kind: type) -> NDArray[Any]:
        sent = self._rows(kind)
        np.multiply(scores, self._out, out=sent, casting="unsafe")
        return sent

    def _rows(self, kind: type) -> NDArray[Any]:
        """Room for a number per row, or several: what is spare, because fresh memory costs half a round to touch."""
        spare = self._spare[kind]
        return spare.pop() if spare else np.empty((self._layout.num_rows, *self._columns), kind)

    def _off(self, total: Any) -> Any:
        """What it costs at most to divide by ``total``, which would be 1 for the exact scores."""
        return abs(1 - total) + self._chain * UNIT
