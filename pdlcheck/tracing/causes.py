"""Causes of a difference: what the wrong pieces are, measured, and what makes such a thing.

Each cause is a prediction that explains every wrong piece within the threshold. No cause is given if none does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from pdlcheck.tracing.assembly import Index, Logical, Piece
from pdlcheck.tracing.layout import MICRO_BATCH
from pdlcheck.tracing.records import Key
from pdlcheck.tracing.thresholds import Distance, Scale, measure

__all__ = ["Difference", "cause_of", "common_factor"]


@dataclass(frozen=True)
class Difference:
    """A tensor that differs.

    Args:
        key: the tensor.
        logical: its pieces in the parallel run; None if it is absent there.
        goal: the trusted tensor.
        scale: the size of the trusted tensor, for distances.
        wrong: the pieces that differ.
        times: the distance of the worst piece in units of its threshold.
        distance: that distance.
        limit: that threshold.
        absent: the ranks that have no gradient.
    """

    key: Key
    logical: Logical | None
    goal: Tensor
    scale: Scale
    wrong: list[Piece]
    times: float
    distance: Distance
    limit: Distance
    absent: tuple[int, ...] = ()

    def element(self) -> tuple[tuple[int, ...], float, float]:
        """Return the index of the element that is wrong most in the first wrong piece, its value and the right one."""
        if not self.wrong or not self.goal.numel():
            return (), float("nan"), float("nan")
        piece = self.wrong[0]
        found, goal = piece.value.double(), piece.of(self.goal).double()
        apart = (found - goal).abs().nan_to_num(nan=torch.inf)
        at = tuple(int(one) for one in torch.unravel_index(apart.argmax(), apart.shape))
        index = tuple(positions[one] for positions, one in zip(piece.index, at, strict=True))
        return index, float(found[at]), float(goal[at])

    def explains(self, found: Tensor, goal: Tensor, times: float = 1.0) -> bool:
        """Return whether two tensors differ by no more than the threshold, and by far less than what was found."""
        left = measure(found, goal, self.scale)
        return left.over(self.limit) <= times and left.over(self.distance) < 0.25


def cause_of(one: Difference, class_name: str) -> str | None:
    """Return the cause of a difference; None if no known cause fits."""
    return next((cause for cause in _causes(one, class_name) if cause), None)


def _causes(one: Difference, class_name: str) -> Iterator[str | None]:
    kind = one.key[0]
    if one.logical is None:
        who = (
            f"rank{'s' if len(one.absent) > 1 else ''} {', '.join(map(str, one.absent))}"
            if one.absent
            else "every rank"
        )
        yield f"{who} had no gradient at the optimizer's step: it took no part in the loss, or is not trained"
        return
    if kind == "start":
        yield "the runs start with different weights: load the same ones into both before the first step"
        return
    if kind == "input":
        yield (
            "the runs are given different samples, or in another order: give both the same batch; "
            "samples= of the mapping tells which samples a rank has"
        )
        return
    yield _not_finite(one)
    yield _zero(one)
    yield _term(one)
    yield _exchanged(one)
    factor = common_factor([one])
    if factor is not None:
        yield _of_factor(one, factor)
    yield _random(class_name)
    yield _replicas(one)
    yield _few_rows(one)
    yield _some_pieces(one)


def common_factor(differences: list[Difference]) -> float | None:
    """Return the factor between what was found and what is right, if one explains all pieces that differ."""
    found = torch.cat([piece.value.double().flatten() for one in differences for piece in one.wrong])
    goal = torch.cat([piece.of(one.goal).double().flatten() for one in differences for piece in one.wrong])
    size = float(goal @ goal)
    if not size or not bool(found.isfinite().all()):
        return None
    factor = float(found @ goal) / size
    if abs(factor) < 1e-3 or abs(factor) > 1e6:
        return None
    for one in differences:
        for piece in one.wrong:
            if not one.explains(piece.value.double() / factor, piece.of(one.goal).double(), 1.5):
                return None
    return factor


def _not_finite(one: Difference) -> str | None:
    if not bool(one.goal.isfinite().all()):
        return None
    wrong = [piece for piece in one.wrong if not bool(piece.value.isfinite().all())]
    return f"{_ranks(wrong)} got inf or NaN here; the trusted run did not" if wrong else None


def _zero(one: Difference) -> str | None:
    if any(bool(piece.value.any()) for piece in one.wrong):
        return None
    what = {
        "update": "the optimizer did not change the parameter there: it does not have it, or its result is overwritten",
        "gradient": "the gradient is zero there: the parameter takes no part in the loss of these ranks, "
        "or its gradient was zeroed before the step",
        "backward": "no gradient arrives there: the graph is cut behind the output, for example by a collective "
        "without a backward pass",
    }.get(one.key[0])
    return f"all elements of {_ranks(one.wrong)} are zero. {what or 'Nothing was written there'}"


def _term(one: Difference) -> str | None:
    """Return the cause of pieces that are terms: their sum or mean over an axis is the trusted tensor."""
    assert one.logical is not None
    for axis in dict.fromkeys(axis for piece in one.wrong for axis in piece.members[0].record.coordinates):
        groups = list(_along(one.logical.pieces, axis))
        if axis == MICRO_BATCH or not groups or any(len(group) < 2 for group in groups):
            continue
        touched = [group for group in groups if any(piece in one.wrong for piece in group)]
        if any(piece not in one.wrong for group in touched for piece in group):
            continue
        for word, divide in (("sum", 1), ("mean", None)):
            totals = [
                torch.stack([piece.value.double() for piece in group]).sum(0) / (divide or len(group))
                for group in touched
            ]
            goals = [group[0].of(one.goal).double() for group in touched]
            alike = all(
                one.explains(piece.value, group[0].value, 1.0) for group in touched for piece in group[1:]
            )  # then it is a factor
            if not alike and all(one.explains(*pair, 2.0) for pair in zip(totals, goals, strict=True)):
                return (
                    f"the {word} over the {axis} ranks is the trusted tensor; each rank has a term of it. "
                    f"An all_reduce ({word}) over {axis} is missing, or runs over other ranks"
                )
    return None


def _exchanged(one: Difference) -> str | None:
    """Return the cause of pieces that are right ones of another place."""
    assert one.logical is not None
    indices = list(dict.fromkeys(piece.index for piece in one.logical.pieces))
    moved: dict[Index, Index] = {}
    for piece in one.wrong:
        for index in indices:
            shape = [len(part) for part in index]
            fits = index != piece.index and shape == list(piece.value.shape)
            if fits and one.explains(piece.value, Piece([], index).of(one.goal)):
                moved[piece.index] = index
        if piece.index not in moved:
            return None
    here, there = next(iter(moved.items()))
    dim = next(i for i, (one_part, other) in enumerate(zip(here, there, strict=True)) if one_part != other)
    return (
        f"{_ranks(one.wrong)} have a right part at a wrong place: elements {here[dim][0]} to {here[dim][-1]} along "
        f"dimension {dim} are the trusted elements {there[dim][0]} to {there[dim][-1]}. Messages, "
        "micro-batches or ranks are exchanged"
    )


def _few_rows(one: Difference) -> str | None:
    """Return how many rows are wrong, if most rows are right and a wide gap separates the two."""
    limit = one.limit.peak * one.scale.peak
    apart: list[Tensor] = []
    empty: list[Tensor] = []
    for piece in one.wrong:
        if piece.value.dim() < 2 or not piece.value.numel():
            return None
        found, goal = piece.value.double().flatten(0, -2), piece.of(one.goal).double().flatten(0, -2)
        apart.append((found - goal).abs().amax(-1))
        empty.append(~found.any(-1))
    rows, zero = torch.cat(apart), torch.cat(empty)
    bad = rows > limit
    number = int(bad.sum())
    if not number or 2 * number > len(rows) or float(rows[bad].min()) < 4 * float(rows[~bad].max()):
        return None
    zeros = int(zero[bad].sum())
    which = "all of them zero" if zeros == number else f"{zeros} of them zero" if zeros else "none of them zero"
    return (
        f"{number} of {len(rows)} rows of the last dimension are wrong on {_ranks(one.wrong)}, {which}; "
        "the others agree: an index, a mask or a boundary leaves out or mixes up some of them"
    )


def _along(pieces: list[Piece], axis: str) -> Iterator[list[Piece]]:
    """Return the groups of pieces that differ in the coordinate on one axis only, and have the same index."""
    groups: dict[object, list[Piece]] = {}
    for piece in pieces:
        record = piece.members[0].record
        where = tuple((name, at) for name, at in record.coordinates.items() if name != axis)
        groups.setdefault((where, piece.index), []).append(piece)
    yield from groups.values()


def _of_factor(one: Difference, factor: float) -> str | None:
    if abs(factor - 1) < 1e-3:
        return None
    near = Fraction(factor).limit_denominator(16)
    is_ratio = near != 0 and abs(float(near) / factor - 1) < max(0.02, 2 * one.limit.norm) and float(near) != 1
    shown = str(near) if is_ratio else f"{factor:.4g}"
    text = f"what {_ranks(one.wrong)} found is {shown} times the trusted tensor"
    sizes = _sizes(one) if is_ratio else {}
    axes = [name for name, of in sizes.items() if near in (of, Fraction(1, of))]
    if one.key[0] == "update":
        return f"{text}: the learning rate of these ranks, or of the parameter's group, differs"
    number = " or of ".join("micro-batches" if axis == MICRO_BATCH else f"{axis} ranks" for axis in axes)
    if axes and near > 1:
        return f"{text}, the number of {number}: a sum where a mean is due, a term added by each, or a loss not divided"
    if axes:
        return f"{text}, one over the number of {number}: a mean where a sum is due, or a division made twice"
    return f"{text}: a scale differs"


def _sizes(one: Difference) -> dict[str, int]:
    """Return the number of coordinates on each axis: those of the ranks, and the micro-batches."""
    assert one.logical is not None
    found = {name: of for member in one.logical.members for name, (_, of) in member.trace.axes.items()}
    batches = {r.micro_batch for member in one.logical.members[:1] for r in member.trace.records}
    return {name: of for name, of in (found | {MICRO_BATCH: len(batches)}).items() if of > 1}


def _random(class_name: str) -> str | None:
    if "Dropout" not in class_name:
        return None
    return "the module draws random numbers: the runs draw others. Record both runs with dropout of 0"


def _replicas(one: Difference) -> str | None:
    """Return the cause of copies of one tensor that differ from rank to rank."""
    assert one.logical is not None
    for axis in dict.fromkeys(axis for piece in one.wrong for axis in piece.members[0].record.coordinates):
        for group in _along(one.logical.pieces, axis):
            right = [piece for piece in group if piece not in one.wrong]
            wrong = [piece for piece in group if piece in one.wrong]
            if right and wrong and axis != MICRO_BATCH:
                return f"{_ranks(wrong)} should hold a copy of what is right on {_ranks(right)}, along {axis}"
            apart = [measure(piece.value, wrong[0].value, one.scale).over(one.limit) for piece in wrong]
            if max(apart, default=0.0) > 1:
                return (
                    f"{_ranks(wrong)} should hold copies along {axis}, and hold different values: "
                    f"they are not synchronised over {axis}"
                )
    return None


def _some_pieces(one: Difference) -> str | None:
    """Return which pieces are wrong, if others are right and an axis separates them."""
    assert one.logical is not None
    right = [piece for piece in one.logical.pieces if piece not in one.wrong]
    if not right:
        return None
    for axis in dict.fromkeys(axis for piece in one.wrong for axis in piece.members[0].record.coordinates):
        bad, good = ({piece.members[0].record.coordinates.get(axis) for piece in some} for some in (one.wrong, right))
        if bad.isdisjoint(good):
            return f"the pieces at {axis} {_numbers(bad)} are wrong, those at {axis} {_numbers(good)} are right"
    return None


def _numbers(found: Iterable[int | None]) -> str:
    return ", ".join(str(one) for one in sorted(one for one in found if one is not None))


def _ranks(pieces: list[Piece]) -> str:
    ranks = sorted({rank for piece in pieces for rank in piece.ranks})
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
