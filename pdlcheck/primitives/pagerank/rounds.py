"""The rounds of the fast solver: sweeps over the edges, and a bound on the error that remains."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdlcheck.primitives.pagerank.even_flow import Sums, even_flow
from pdlcheck.primitives.pagerank.gathering import FIRST_COUNTER, GIVEN_UP, LANES, NUM_SUMS
from pdlcheck.primitives.pagerank.graph import Float64
from pdlcheck.primitives.pagerank.kernels import TILE, sweep
from pdlcheck.primitives.pagerank.layout import Layout
from pdlcheck.primitives.pagerank.many_kernels import PART, sweep_many
from pdlcheck.primitives.pagerank.progress import RoundProgress, unheard
from pdlcheck.primitives.pagerank.threads import Team

__all__ = ["Rounds"]

UNIT = float(np.finfo(np.float64).eps) / 2
TINY = 2.0**-150  # the largest error of a float32 below its range of normal numbers
CHUNKS = 16  # chunks of a large graph; a chunk's blocks are swept at once, later chunks read its new values
BLOCKS_PER_CHUNK = 4  # at least this number, so that every thread finds work
NEAR = 128  # times the best bound of float32; below that, the next round may be the last one before a residual
CLOSE = 1 / 16  # scores with a larger error bound are not refined; they only start the sweeps

_NOTHING: Float64 = np.empty(0)


@dataclass
class _Dangling:
    """The dangling mass that belongs to some scores.

    ``held`` is the mass of the dangling rows that are swept. ``leaving`` is the mass that the swept rows send to the
    sinks that are not.
    """

    held: Any
    leaving: Any

    def plus(self, factor: Any, other: _Dangling) -> _Dangling:
        return _Dangling(self.held + factor * other.held, self.leaving + factor * other.leaving)


@dataclass
class _System:
    """The system ``y = to_base base + d (P y + m w)``, and the start of its iteration.

    ``dangling`` and ``sent`` are the start: the dangling mass, and the values that nodes send. ``lost`` is the
    round-off in ``base``, whose L1 norm is ``size``. If ``whole`` is given, y is a correction to these scores, whose
    sum is ``total``. Each number is a single one, or one for each of LANES vectors. If ``found`` is given, y is stored
    there in float64.
    """

    base: Float64
    to_base: float
    dangling: _Dangling
    sent: NDArray[Any]
    lost: Any = 0.0
    size: Any = 1.0
    whole: Float64 | None = None
    total: Any = 0.0
    found: Float64 | None = None


class Rounds:
    """The solver of ``x = (1 - d) v + d (P x + m w)`` by sweeps that use each new score at once, or all of them later.

    **Error bound.** A sweep leaves the residual ``U (x - s)``. Here s is the scores that the rows read, and U is the
    part of the matrix that was multiplied with them. The columns of U sum to d at most, as those of the whole matrix
    do. So the true L1 error is at most ``(d |x - s| + round-off) / (1 - d)``. The kernel measures ``|x - s|`` against
    the values that were really sent, so the bound includes rescaling and its rounding.

    **Two precisions.** On large graphs, nodes send float32 values, which halves the memory to read from at random. When
    its rounding shows, one round in float64 computes the residual r of the scores so far. The next sweeps solve
    ``y = r + d (P y + m w)`` for the missing part y, again in float32. The rounding is now relative to y. This is
    iterative refinement. A score is the sent value times the out-degree, so scores are stored only for a residual.

    **Sinks.** A round in place leaves sinks out. Their mass is m less the mass of the other dangling nodes. It follows
    from what the swept rows send to them:
    ``(base of sinks + d (leaving + landing on sinks held)) / (1 - d landing on sinks)``, where "held" is the mass of
    the other dangling nodes. No row reads the score of a single sink, so these scores are computed only when the bound
    is about to hold. The bound is then measured with them.

    **Upstream.** Rows that no cycle leads to have exactly the scores ``base + d m landing``, once these two vectors
    include what such rows send. They are in no sweep, and in no residual except that of m.

    **Sum.** The exact scores sum to 1. So after each round in place, the scores of the swept rows are scaled until the
    sum is 1, including the mass that the sinks would then hold. This solves the equation for all sinks as one state
    (aggregation). No row is written: the equation is linear, so only the unit of all numbers changes, and with it the
    contribution of the base.

    Source: Wilkinson, "Rounding errors in algebraic processes" (1963), for refinement; Ipsen and Selee, "PageRank
        computation, with special attention to dangling nodes" (2007), for one state in place of them; Koury, McAllister
        and Stewart, "Iterative methods for computing stationary distributions" (1984), for aggregation.
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
        self._upstream = slice(layout.end_of_blocks, layout.num_rows)
        self._teleport, self._landing, self._taken_in = self._with_upstream(teleport, landing)
        self._columns = teleport.shape[1:]  # empty for one vector, else (LANES,)
        self._sweep_blocks = sweep_many if self._columns else sweep
        self._out = layout.out[:, None] if self._columns else layout.out
        self._leaving = layout.leaving if in_place else None
        self._sent_late = np.zeros(layout.num_rows) if self._columns and self._leaving is None else self._leaving
        # blocks from here on are swept after the others
        blocks = self._late = layout.num_blocks if self._leaving is None else layout.sink_block
        self._late_row = int(layout.bounds[blocks]) * LANES
        self._early_dangling = layout.dangling[layout.dangling < self._late_row]
        self._single = layout.sink_block > 1
        count = max(1, min(CHUNKS, blocks // BLOCKS_PER_CHUNK)) if in_place else 1
        self._chunks = blocks * np.arange(count + 1) // count
        self._at_once = in_place and not self._single
        # after so many rounds the residual is a quarter of what it was, unless rounding keeps it larger
        self._patience = 8 + (math.ceil(2 * math.log(2) / -math.log(damping)) if damping else 0)
        self._drowned = 1 / 16  # share of the round-off of one round: a residual below that is round-off itself
        self._reach = float(np.finfo(np.float32).eps) / (1 - damping)  # about the best bound of float32
        self._late_rows = slice(self._late_row, layout.end_of_blocks)
        self._landing_late = self._landing[self._late_rows].sum(axis=0)
        self._landing_upstream = self._landing[self._upstream].sum(axis=0)
        self._parts = np.empty((layout.num_blocks, NUM_SUMS, *self._columns))
        self._spare: dict[type, list[NDArray[Any]]] = {np.float32: [], np.float64: []}
        slices = int(np.diff(layout.bounds).max())
        # the roundings of a term in a sum over rows: the slices of a tile, lanes, tiles of a block, blocks
        in_a_tile = min(TILE, slices) * (LANES if self._columns else 1)
        self._chain = in_a_tile + LANES + slices / TILE + layout.num_blocks
        if layout.upstream is not None:
            self._chain += 32  # numpy's pairwise sums
        # the roundings of a term in the longest sum of a row
        self._longest = PART + layout.longest * LANES // PART if self._columns else layout.longest + LANES
        self.iteration = 0

    def run(self, first: Float64 | None, tol: float, max_iter: int, *, warm: bool) -> tuple[Float64, Any]:
        """Sweep from ``first`` until each error bound is at most ``tol``, if possible; return scores and bounds.

        ``first`` has one number per row; ``None`` begins with :func:`even_flow`. The scores have one number per node.
        With ``warm`` on a large graph, ``_refine`` comes first; sweeps from ``first`` follow only if the bound is above
        CLOSE.
        """
        layout, sinks = self._layout, self._layout.sink_block
        with Team(max(sinks, layout.num_blocks - sinks)) as self._team:
            self._rooms = [np.empty((2 + NUM_SUMS) * LANES) for _ in range(self._team.size)]
            bound = np.full(self._columns, math.inf)
            if first is not None and self._single and warm:
                scores, bound = first, self._refine(first, tol, max_iter, at_most=CLOSE)
            if not np.all(bound <= CLOSE) and self.iteration < max_iter:
                kind = np.float32 if self._single else np.float64
                sent, dangling = self._even_flow(kind) if first is None else self._begun(first, kind)
                system = _System(self._teleport, 1 - self._damping, dangling, sent)
                if self._single and tol < self._reach:
                    system.found = self._rows(np.float64)
                bound = self._solve(system, tol, max_iter)
                if not self._single or np.all(bound <= tol) or self.iteration >= max_iter:
                    return layout.nodes_of(sent, layout.divisors, self._team), bound
                if system.found is None:
                    scores = self._rows(np.float64)
                    self._take_scores(sent, scores)
                else:
                    scores = system.found
                self._spare[np.float32].append(sent)
            while self._single and not np.all(bound <= tol) and self.iteration < max_iter:
                reached = bound
                bound = self._refine(scores, tol, max_iter)
                if not np.any(bound < reached / 2):
                    break
            return layout.nodes_of(scores, None, self._team), bound

    def _even_flow(self, kind: type) -> tuple[NDArray[Any], _Dangling]:
        """Return the values that nodes send at the start of :func:`even_flow`, and the dangling mass."""
        sent, leaving = self._layout.in_degrees(kind), self._leaving
        base, landing, keep = self._teleport, self._landing, 1 - self._damping
        of_base = self._held(base)
        of_landing = of_base if landing is base else self._held(landing)
        carried, landed = even_flow(self._damping, of_base, of_landing, self._held(sent))
        terms = [(base, keep + landed)] if landing is base else [(base, keep), (landing, landed)]

        def scores(rows: Any) -> Float64:
            found: Float64 = np.multiply(sent[rows], carried, dtype=np.float64)
            for vector, factor in terms:
                found += vector[rows] * factor
            return found

        def send(rows: slice) -> float:  # overwrites the in-degrees
            found = scores(rows)
            np.multiply(found, self._out[rows], out=sent[rows], casting="same_kind")
            return 0.0 if leaving is None else float(np.einsum("i,i", leaving[rows], found))

        held = scores(self._early_dangling).sum()
        return sent, _Dangling(held, sum(self._team.map(send, len(sent))))

    def _held(self, vector: NDArray[Any]) -> Sums:
        """Return the sum of ``vector`` over all rows, and over the dangling ones."""
        number = np.float64
        dangling = vector[self._early_dangling].sum(dtype=number) + vector[self._late_rows].sum(dtype=number)
        return Sums(vector.sum(dtype=number), dangling)

    def _begun(self, scores: Float64, kind: type) -> tuple[NDArray[Any], _Dangling]:
        """Return the values that nodes with these scores send, and the dangling mass."""
        return self._sent_by(scores, kind), self._dangling_of(scores)

    def _refine(self, scores: Float64, tol: float, max_iter: int, *, at_most: float = math.inf) -> Any:
        """Run one round in float64, then sweep for the missing part and add it; return the bound.

        ``scores`` are scaled to sum 1 before that, and not after it. If the bound of the float64 round is above
        ``at_most``, no sweeps follow.
        """
        layout, damping = self._layout, self._damping
        self.iteration += 1
        total = scores.sum(axis=0)
        self._team.map(lambda rows: np.divide(scores[rows], total, out=scores[rows]), len(scores))
        sent, mass = self._sent_by(scores, np.float64), scores[layout.dangling].sum(axis=0)
        missing, missing_sent = self._rows(np.float64), self._rows(np.float32)
        self._make_upstream(scores, self._teleport, 1 - damping, mass)
        missing[self._upstream] = missing_sent[self._upstream] = 0
        whole = np.array([0, layout.num_blocks])
        self._sweep(whole, self._teleport, 1 - damping, mass, sent, scores, missing, missing_sent, moves=False)
        self._spare[np.float64].append(sent)
        step, _, change, _, weighted = self._sums()
        lost = UNIT * (weighted + layout.share_error + self._chain * mass + 4) + self._lost_upstream(1 - damping, mass)
        total = scores.sum(axis=0)
        bound = (damping * step * (1 + 1e-9) + lost) / (1 - damping) + self._off(total + change)
        self._progress(self.iteration, float(np.max(bound)))
        ends = np.all((bound <= tol) | (damping * step <= lost / 16)) or self.iteration == max_iter
        if ends or not np.all(bound <= at_most):
            scores += missing
            self._spare[np.float64].append(missing)
            self._spare[np.float32].append(missing_sent)
            return bound
        begun = self._dangling_of(missing), missing_sent
        system = _System(missing, 1.0, *begun, lost, step, scores, total)
        bound = self._solve(system, tol, max_iter)
        self._take_scores(missing_sent, scores, adds=True)
        self._spare[np.float64].append(missing)
        self._spare[np.float32].append(missing_sent)
        return bound

    def _solve(self, system: _System, tol: float, max_iter: int) -> Any:
        """Run rounds until the bound is at most ``tol``, if possible; return the bound for scores scaled to sum 1.

        Afterwards ``system.sent`` holds the values that rows send; for dangling rows it holds their scores.
        ``system.found``, if not ``None``, holds all scores.
        """
        layout, damping, late = self._layout, self._damping, self._late
        sent, whole = system.sent, system.whole
        largest = int(np.diff(layout.bounds[self._chunks]).max()) * LANES
        fresh = sent if self._at_once else np.empty((largest, *self._columns), sent.dtype)
        dangling, senders = system.dangling, slice(self._late_row)
        fixed = system.to_base * system.base[self._late_rows].sum(axis=0) / (1 - damping * self._landing_late)
        base_upstream = system.to_base * system.base[self._upstream].sum(axis=0)
        landing_upstream = damping * self._landing_upstream
        if whole is not None:
            whole_sent, whole_dangling = self._sent_by(whole, sent.dtype.type), self._dangling_of(whole)
            due = system.base.sum(axis=0) / (1 - damping)
            # one unit of `whole` adds this to the sum of all scores, including those of sinks and upstream rows
            whole_late = self._late_mass(whole_dangling)
            adds = whole[senders].sum(axis=0) + whole_late + landing_upstream * (whole_dangling.held + whole_late)
        unit: Any = 1.0
        bound, found, looked_at, before = math.inf, _NOTHING, self.iteration, math.inf
        while True:
            self.iteration += 1
            if system.found is not None and np.all(bound <= NEAR * self._reach):
                found = system.found
            to_base, late_base = system.to_base / unit, fixed / unit
            met = dangling.held + late_base + self._late_mass(dangling)
            vectors = met, sent, None, found, fresh
            self._sweep(self._chunks, system.base, to_base, *vectors, moves=not self._at_once)
            step, dangling.held, dangling.leaving, swept, size, weighted = self._parts[:late].sum(axis=0)
            late_mass = late_base + self._late_mass(dangling)
            mass = dangling.held + late_mass
            upstream = base_upstream / unit + landing_upstream * met
            sums = step, mass, swept + late_mass + upstream, size + abs(late_mass) + abs(upstream), weighted
            bound, enough = self._judged(system, unit, (met, *sums), tol)
            if (enough or self.iteration >= max_iter) and late < layout.num_blocks:
                blocks, vectors = np.array([late, layout.num_blocks]), (met, sent, None, found, sent)
                self._sweep(blocks, system.base, to_base, *vectors, moves=False)
                step, mass, total, size, weighted = self._sums()
                sums = step, mass, total + upstream, size + abs(upstream), weighted
                bound, enough = self._judged(system, unit, (met, *sums), tol)
            if self.iteration - looked_at >= self._patience:
                if np.all((bound <= tol) | (bound > 3 / 4 * before)):
                    if self._single:
                        enough = True
                    else:
                        self._drowned = 4
                looked_at, before = self.iteration, bound
            self._progress(self.iteration, float(np.max(bound)))
            if enough or self.iteration >= max_iter:
                self._make_upstream(sent, system.base, to_base, met)
                sent[self._upstream] *= _divisors(self._out[self._upstream])
                if found is _NOTHING:
                    system.found = None
                else:
                    self._make_upstream(found, system.base, to_base, met)
                if whole is not None:
                    self._spare[sent.dtype.type].append(whole_sent)
                return bound
            if whole is None:
                grows = swept + late_mass - late_base + landing_upstream * (mass - late_base)
                stays = fixed + base_upstream + landing_upstream * fixed
                unit = np.where((grows > 0) & (stays < 1), (1 - stays) / np.where(grows > 0, grows, 1), unit)
            else:
                more = np.where(adds > 0, (due - sums[2]) / np.where(adds > 0, adds, 1), 0)
                sent[senders] += np.asarray(more, sent.dtype) * whole_sent[senders]
                dangling = dangling.plus(more, whole_dangling)

    def _judged(self, system: _System, unit: Any, sums: tuple[Any, ...], tol: float) -> tuple[Any, bool]:
        """Return the bound on the error after a round, and whether the rounds end: it is reached, or out of reach.

        ``sums``, in units of ``unit``, are the dangling mass that the rows read, then the numbers of :meth:`_sums`.
        """
        damping, layout = self._damping, self._layout
        met, step, new_mass, total, size, weighted = (unit * number for number in sums)
        if system.whole is None:
            lost = UNIT * (weighted + layout.share_error * size + self._chain * new_mass)
            lost += self._lost_upstream(system.to_base, met)
        else:  # terms have either sign and no sum bounds them, so count the longest sum for each
            each = 16 + self._longest + layout.share_error + self._chain
            lost = UNIT * each * (size + step + system.size) + system.lost + self._lost_upstream(0, met)
        sender_size, eps = unit * self._parts[: self._late, 4].sum(axis=0), float(np.finfo(system.sent.dtype).eps)
        lost += damping * (eps / 2 * sender_size + unit * len(layout.sources) * TINY)
        # scores computed from sent values carry their rounding, and so does the sum that scales them
        rounding = eps * size + unit * 2 * len(layout.sources) * TINY
        residual = damping * (step + abs(new_mass - met)) * (1 + 1e-9)
        bound = (residual + lost) / (1 - damping) + rounding + self._off(system.total + total)
        refinable = self._single & (lost > tol * (1 - damping) / 2)
        drowned = residual <= lost * np.where(refinable, 4, self._drowned)  # the residual is round-off
        return bound, bool(np.all((bound <= tol) | drowned))

    def _sweep(
        self,
        chunks: NDArray[np.int64],
        base: Float64,
        to_base: Any,
        mass: Any,
        sent: NDArray[Any],
        before: Float64 | None,
        scores: Float64,
        fresh: NDArray[Any],
        *,
        moves: bool,
    ) -> None:
        layout, damping, counters = self._layout, self._damping, np.array([*[0] * FIRST_COUNTER, *chunks[:-1]])
        matrix = layout.bounds, layout.long_rows, layout.begins, layout.sources, layout.shares
        per_vector = np.broadcast_to(to_base, self._columns).copy() if self._columns else float(to_base)
        factors = damping, per_vector, damping * mass
        earlier = None if before is None else before.reshape(-1)
        per_row = base.reshape(-1), self._landing.reshape(-1), layout.out, self._sent_late
        vectors = *per_row, sent.reshape(-1), earlier, scores.reshape(-1), fresh.reshape(-1)

        def work(member: int) -> None:
            blocks = counters, member, self._team.size, chunks
            own = moves, self._rooms[member], self._parts
            self._sweep_blocks(*blocks, *matrix, *factors, *vectors, *own)  # type: ignore[arg-type]

        def give_up() -> None:
            counters[GIVEN_UP] = 1

        self._team.run(work, give_up)

    def _with_upstream(self, teleport: Float64, landing: Float64) -> tuple[Float64, Float64, tuple[Any, Any]]:
        """Return both vectors with the values added that upstream rows send, and the round-off of each addition."""
        upstream, damping = self._layout.upstream, self._damping
        if upstream is None:
            return teleport, landing, (0.0, 0.0)
        base, lost = upstream.taken_in(teleport, damping)
        if landing is teleport:
            return base, base, (lost, lost)
        lands, lost_of_it = upstream.taken_in(landing, damping)
        return base, lands, (lost, lost_of_it)

    def _make_upstream(self, scores: NDArray[Any], base: Float64, to_base: Any, met: Any) -> None:
        """Write the scores of upstream rows for the dangling mass ``met``."""
        rows = self._upstream
        scores[rows] = to_base * base[rows] + self._damping * met * self._landing[rows]

    def _lost_upstream(self, to_base: float, mass: Any) -> Any:
        return to_base * self._taken_in[0] + self._damping * abs(mass) * self._taken_in[1]

    def _sums(self) -> tuple[Any, ...]:
        """Return step, dangling mass, total, absolute total and additions: one number each, or one per vector."""
        step, mass, _, total, size, weighted = self._parts.sum(axis=0)
        return step, mass, total, size, weighted

    def _late_mass(self, dangling: _Dangling) -> Any:
        """Return the mass that late rows would hold if they were swept now, without the part from their base."""
        arriving = dangling.leaving + self._landing_late * dangling.held
        return self._damping * arriving / (1 - self._damping * self._landing_late)

    def _dangling_of(self, scores: Float64) -> _Dangling:
        swept = scores[: self._late_row]
        leaving = 0.0 if self._leaving is None else np.einsum("i,i...->...", self._leaving[: self._late_row], swept)
        return _Dangling(scores[self._early_dangling].sum(axis=0), leaving)

    def _sent_by(self, scores: Float64, kind: type) -> NDArray[Any]:
        sent = self._rows(kind)

        def send(rows: slice) -> None:
            np.multiply(scores[rows], self._out[rows], out=sent[rows], casting="same_kind")

        self._team.map(send, len(sent))
        return sent

    def _take_scores(self, sent: NDArray[Any], scores: Float64, *, adds: bool = False) -> None:
        """Store in ``scores`` the scores of rows that send these values, or add them to it."""

        def take(rows: slice) -> None:
            found = sent[rows] / _divisors(self._out[rows])
            if adds:
                scores[rows] += found
            else:
                scores[rows] = found

        self._team.map(take, len(scores))

    def _rows(self, kind: type) -> NDArray[Any]:
        """Return an array with one number per row, or one per row and vector.

        It reuses a spare array if there is one, because the first access to fresh memory costs half a round.
        """
        spare = self._spare[kind]
        return spare.pop() if spare else np.empty((self._layout.num_rows, *self._columns), kind)

    def _off(self, total: Any) -> Any:
        """Return the largest error of a division by ``total``, which would be 1 for the exact scores."""
        return abs(1 - total) + self._chain * UNIT


def _divisors(out: Float64) -> Float64:
    """Return the factor from the score of a row to its sent value.

    It is 1 for a dangling row, which stores its score instead of a sent value.
    """
    return np.where(out == 0, 1, out)
