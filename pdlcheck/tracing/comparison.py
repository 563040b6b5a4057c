"""The comparison of two traces: the first place in which they part by more than rounding explains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from pdlcheck.tracing.assembly import Index, Piece, absent_gradients, logical_tensors
from pdlcheck.tracing.causes import Difference, cause_of, common_factor
from pdlcheck.tracing.errors import TraceError
from pdlcheck.tracing.files import Trace, read_trace
from pdlcheck.tracing.matching import require_one_model, require_shapes
from pdlcheck.tracing.places import Place, place_of
from pdlcheck.tracing.records import KINDS, Key
from pdlcheck.tracing.thresholds import Distance, Scale, Thresholds, measure, narrowest, scale_of

__all__ = ["Comparison", "Parting", "compare_traces"]


@dataclass(frozen=True)
class Parting:
    """The first place at which two traces part.

    Args:
        place: the module, the direction and the tensor.
        step: the step, from 1.
        micro_batch: the micro-batch, from 1; None for gradients of parameters and updates.
        ranks: the ranks whose piece is wrong, of all that have the tensor.
        all_ranks: the ranks that have the tensor.
        index: the first wrong element in the logical tensor.
        found: its value.
        expected: its trusted value.
        times: the distance of the worst piece, in units of the threshold.
        distance: the distance of the worst piece.
        limit: the threshold.
        cause: what makes such a difference; None if no known cause fits.
        others: how many more tensors of the step part in this direction.
    """

    place: Place
    step: int
    micro_batch: int | None
    ranks: list[int]
    all_ranks: list[int]
    index: tuple[int, ...]
    found: float
    expected: float
    times: float
    distance: Distance
    limit: Distance
    cause: str | None
    others: int


@dataclass
class Comparison:
    """The result of ``compare_traces``.

    Args:
        first: where the traces part first; None if they agree.
        steps: the number of steps that were compared.
        tensors: the number of logical tensors that were compared.
        nearest: a bound of the distances of all tensors that agree, in units of their thresholds.
        dtype: the dtype whose rounding counts.
        is_estimated: thresholds come from perturbed runs.
        notes: remarks on what was not compared.
    """

    first: Parting | None = None
    steps: int = 0
    tensors: int = 0
    nearest: float = 0.0
    dtype: torch.dtype = torch.float32
    is_estimated: bool = False
    notes: list[str] = field(default_factory=list)


def compare_traces(
    trusted: str | Path, parallel: str | Path, *, perturbed: str | Path | Sequence[str | Path] = ()
) -> Comparison:
    """Return the first place at which the trace of a parallel run parts from that of a trusted run.

    Args:
        trusted: the directory of the trace of a run that is right: one process, or a smaller plan.
        parallel: the directory of the other trace.
        perturbed: directories of traces of the trusted run with ``perturb=``. They tell how far rounding moves each
            tensor. Without them, the thresholds are constants of the dtype.

    Raises:
        TraceError: a trace cannot be read, or the two do not belong to one model and the same samples.
    """
    extra = [perturbed] if isinstance(perturbed, str | Path) else list(perturbed)
    good, other = read_trace(Path(trusted)), read_trace(Path(parallel))
    noisy = [read_trace(Path(one)) for one in extra]
    result = Comparison(steps=min([good.steps, other.steps, *(one.steps for one in noisy)]))
    if other.steps != good.steps:
        result.notes.append(f"the traces have {good.steps} and {other.steps} steps; {result.steps} were compared")
    for one in (good, other):
        if any(rank.perturbed for rank in one.ranks):
            raise TraceError(f"{one.directory} was recorded with perturb=; give it with --perturbed")
    for one in noisy:
        if not all(rank.perturbed for rank in one.ranks):
            raise TraceError(f"{one.directory} was recorded without perturb=; record the trusted run with perturb=1")
    require_one_model(good, other)
    for one in noisy:
        require_one_model(good, one)
    result.dtype = narrowest(_dtypes(good) | _dtypes(other))
    ratio = torch.finfo(result.dtype).eps / torch.finfo(narrowest(_dtypes(good))).eps
    limits = Thresholds(result.dtype, bool(noisy), ratio)
    result.is_estimated = limits.is_estimated
    uncertain: dict[str, Tensor] = {}
    for step in range(result.steps):
        _Step(good, other, noisy, step, limits, result, uncertain).compare()
        if result.first is not None:
            break
    result.notes = list(dict.fromkeys(result.notes))
    return result


class _Step:
    """The comparison of one step."""

    def __init__(
        self,
        good: Trace,
        other: Trace,
        noisy: list[Trace],
        step: int,
        limits: Thresholds,
        result: Comparison,
        uncertain: dict[str, Tensor],
    ) -> None:
        self.trace = good
        self.good, self.other = logical_tensors(good, step), logical_tensors(other, step)
        self.moved: dict[tuple[Key, Index], list[Distance]] = {}
        self.absent = absent_gradients(other, step)
        self.noisy = [logical_tensors(one, step) for one in noisy]
        self.step = step
        self.limits = limits
        self.result = result
        self.uncertain = uncertain  # by parameter: where a gradient was so small that its sign is noise
        self.scales = {key: scale_of(one.value) for key, one in self.good.items()}
        self.largest = {
            kind: Scale(
                max((one.rms for (of, *_), one in self.scales.items() if of == kind), default=0.0),
                max((one.peak for (of, *_), one in self.scales.items() if of == kind), default=0.0),
            )
            for kind in KINDS
        }

    def compare(self) -> None:
        """Compare all tensors of the step; set ``result.first`` to the first that parts."""
        require_shapes(self.good, self.other, self.step, self.result.notes)
        parted: list[Difference] = []
        for kind in KINDS:
            keys = [key for key in self.good if key[0] == kind]
            for key in reversed(keys) if kind == "gradient" else keys:  # gradients from the last layer on
                parted += self._difference(key)
            if kind == "gradient":
                self._drop_common_factor(parted)
            if parted and kind != "backward":
                break
        if parted:
            self.result.first = self._parting(parted)

    def _difference(self, key: Key) -> list[Difference]:
        """Return how the pieces of a tensor differ: a list of one, or empty if all agree."""
        if key not in self.other or key in self.absent:
            return self._absent(key) if key[0] in {"gradient", "update"} else []
        self.result.tensors += 1
        goal, found = self.good[key].value, self.other[key]
        scale = self.scales[key].at_least(self.largest[key[0]], self.limits.small)
        if key[0] in {"start", "input"}:
            scale = self.scales[key]
        wrong: list[Piece] = []
        worst, worst_distance, worst_limit = 0.0, Distance(0.0, 0.0), Distance(0.0, 0.0)
        parts: dict[Index, tuple[Tensor, Tensor | None]] = {}  # copies on several ranks have one index
        for piece in found.pieces:
            if piece.index not in parts:
                parts[piece.index] = piece.of(goal), self._certain(key, piece) if key[0] == "update" else None
            part, mask = parts[piece.index]
            distance = measure(piece.value, part, scale, mask)
            limit = self._limit(key, piece.index, scale, mask, distance)
            times = distance.over(limit)
            if times > 1:
                wrong.append(piece)
            if times > worst or not wrong:
                worst, worst_distance, worst_limit = max(times, worst), distance, limit
        if key[0] == "gradient":
            self._note_uncertain(key, scale)
        if not wrong:
            self.result.nearest = max(self.result.nearest, worst)
            return []
        return [Difference(key, found, goal, scale, wrong, worst, worst_distance, worst_limit)]

    def _limit(self, key: Key, index: Index, scale: Scale, mask: Tensor | None, distance: Distance) -> Distance:
        """Return the limit of a piece; what is within rounding of the dtype needs no perturbed run."""
        if key[0] in {"start", "input"}:
            return self.limits.exact()
        limit = self.limits.limit([])
        if distance.over(limit) > 1:
            if (key, index) not in self.moved:
                self.moved[key, index] = list(self._moved(key, Piece([], index), scale, mask))
            limit = self.limits.limit(self.moved[key, index])
        around = self.good[key].members[0].record.around
        if key[0] == "update" and around is not None:  # the parameter itself is rounded when it is written
            eps = torch.finfo(self._dtypes.get(key[1], torch.float32)).eps
            limit = Distance(
                limit.norm + (eps * around[0] / scale.rms if scale.rms else 0.0),
                limit.peak + (2 * eps * around[1] / scale.peak if scale.peak else 0.0),
            )
        return limit

    def _moved(self, key: Key, piece: Piece, scale: Scale, mask: Tensor | None) -> Iterator[Distance]:
        """Return how far each perturbed run moves a piece, and the whole tensor."""
        goal = self.good[key].value
        for noisy in self.noisy:
            if key in noisy:
                other = noisy[key].value
                yield measure(piece.of(other), piece.of(goal), scale, mask)
                if mask is None:
                    yield measure(other, goal, scale)

    @cached_property
    def _dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each parameter."""
        starts = [(rank, one) for rank in self.trace.ranks for one in rank.records if one.kind == "start" and one.key]
        names = {one.name: rank.file.get_slice(one.key).get_dtype() for rank, one in starts}
        return {name: _DTYPES[dtype] for name, dtype in names.items() if dtype in _DTYPES}

    def _note_uncertain(self, key: Key, scale: Scale) -> None:
        """Note where a gradient is within rounding of zero: Adam makes a full step of its sign there."""
        goal = self.good[key].value
        limit = self._limit(key, tuple(map(range, goal.shape)), scale, None, Distance(float("inf"), float("inf")))
        small = goal.double().abs() <= limit.norm * scale.rms
        before = self.uncertain.get(key[1])
        self.uncertain[key[1]] = small if before is None else before | small

    def _certain(self, key: Key, piece: Piece) -> Tensor | None:
        small = self.uncertain.get(key[1])
        if small is None:
            return None
        gradients = self.good.get(("gradient", *key[1:]))
        untouched = gradients.value == 0 if gradients is not None else torch.zeros_like(small)
        return piece.of(~small | untouched)

    def _absent(self, key: Key) -> list[Difference]:
        ranks = tuple(self.absent.get(key, ()))
        none = Distance(0.0, 0.0)
        return [Difference(key, None, self.good[key].value, self.scales[key], [], float("inf"), none, none, ranks)]

    def _drop_common_factor(self, parted: list[Difference]) -> None:
        """Drop gradients of outputs that are all off by one factor, if the gradients of all parameters are right."""
        backward = [one for one in parted if one.key[0] == "backward"]
        everything = [key for key in self.good if key[0] == "backward" and key in self.other]
        if not backward or len(backward) < len(parted) or len(backward) < len(everything):
            return
        factor = common_factor(backward)
        if factor is not None:
            parted.clear()
            self.result.notes.append(
                f"gradients of outputs are {factor:.4g} times the trusted ones, and gradients of parameters agree: "
                "the loss has another scale during the backward pass; mean_over= of the mapping can say so"
            )

    def _parting(self, parted: list[Difference]) -> Parting:
        first = parted[0]
        agreed = {key for key in self.good if key in self.other} - {one.key for one in parted}
        where = place_of(first.key, self.good, agreed, self.trace)
        piece = first.wrong[0] if first.wrong else None
        index, found, expected = first.element()
        of_samples = first.key[0] in {"input", "forward", "backward"}
        return Parting(
            place=where,
            step=self.step + 1,
            micro_batch=piece.members[0].record.micro_batch + 1 if piece is not None and of_samples else None,
            ranks=sorted({*first.absent, *(rank for one in first.wrong for rank in one.ranks)}),
            all_ranks=sorted({one.trace.rank for one in first.logical.members}) if first.logical else [],
            index=index,
            found=found,
            expected=expected,
            times=first.times,
            distance=first.distance,
            limit=first.limit,
            cause=cause_of(first, where.class_name),
            others=sum(one.key[0] == first.key[0] for one in parted) - 1,
        )


def _dtypes(trace: Trace) -> set[torch.dtype]:
    """Return the dtypes of the outputs of modules in the first step."""
    names: set[str] = set()
    for rank in trace.ranks:
        for record in rank.records:
            if record.kind == "forward" and record.step == 0:
                names.add(rank.file.get_slice(record.key).get_dtype())
    return {_DTYPES[name] for name in names if name in _DTYPES}


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
