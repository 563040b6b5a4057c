"""The causes that single backward passes show: the weights of micro-batches and ranks in the gradients of a step.

The gradient of a step is a sum of those of its backward passes, on all ranks, each times a weight. The weights come
from a least-squares fit: of the gradient that the optimizer was given, and of the right one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain
from pdlcheck.checks.message import first_and_more
from pdlcheck.checks.trajectories.steps import Given

__all__ = ["Weights", "diagnose_own_factor", "diagnose_weights", "diagnose_weights_of_some", "weights_of_passes"]

_MOST = 64  # backward passes of all ranks in a step
_CONDITION = 1e-4  # the least ratio of singular values at which weights are told apart
_UNLIKE = 1e-2  # the least difference of two weights, as a part of the largest


class Weights(NamedTuple):
    """The weights of backward passes in the gradients of a step, with a row for each rank and a column for each pass.

    Args:
        found: in the gradient that the optimizer was given.
        right: in that of the right training.
        norms: of the sum of a rank's passes with the weights of ``found``.
        what: the name of the right training.
    """

    found: Tensor
    right: Tensor
    norms: Tensor
    what: str

    @property
    def factor(self) -> float | None:
        """Return the factor between them if that is all that they differ by."""
        factor = float((self.found * self.right).sum() / self.right.square().sum())
        return None if _differ(self.found, factor * self.right) else factor

    def names(self, at: Tensor) -> str:
        """Return the words for the passes at which the mask is true."""
        ranks, passes = self.found.shape
        pairs = [divmod(int(index), passes) for index in at.flatten().nonzero().flatten()]
        of_ranks = [f"rank {rank}" for rank, _ in pairs]
        of_passes = [f"backward pass {number + 1}" for _, number in pairs]
        both = [f"{one} of {rank}" for one, rank in zip(of_passes, of_ranks, strict=True)]
        words = of_ranks if passes == 1 else of_passes if ranks == 1 else both
        return ", ".join(words[:3]) + (f" and {len(words) - 3} more" if words[3:] else "")


def weights_of_passes(
    names: Sequence[str], again: Sequence[Given], rank: int, right: Given, allowed: float, what: str
) -> Weights | None:
    """Return the weights; None if they are not known, or if the gradients are no sums of those of the passes.

    Args:
        names: the wrong parameters.
        again: what the optimizers of every rank were given in another run, with the gradients of single passes.
        rank: the wrong rank.
        right: what the optimizers of this rank were given in the right training.
        allowed: the relative error of a sum of gradients that is right.
        what: the name of the right training.
    """
    if any(name not in given for given in (*again, right) for name in names):
        return None
    counts = {len(given[name].passes) for given in again for name in names}
    sides = [[given[name].gradient for name in names] for given in (again[rank], right)]
    (passes,) = counts if len(counts) == 1 else (0,)
    if not 2 <= len(again) * passes <= _MOST or any(one is None for side in sides for one in side):
        return None
    columns = [_joined([given[name].passes[number] for name in names]) for given in again for number in range(passes)]
    goals = [_joined(side) for side in sides]
    if any(one.shape != columns[0].shape for one in (*columns, *goals)) or len(columns[0]) < len(columns) + 2:
        return None
    matrix, both = torch.stack(columns, dim=1), torch.stack(goals, dim=1)
    if not (matrix.isfinite().all() and both.isfinite().all()):
        return None
    spread = torch.linalg.svdvals(matrix)
    if spread[-1] <= _CONDITION * spread[0]:
        return None
    fit = torch.linalg.lstsq(matrix, both).solution
    if bool(((matrix @ fit - both).norm(dim=0) > max(1e-6, allowed) * both.norm(dim=0)).any()):
        return None
    found, expected = fit.view(len(again), passes, 2).unbind(-1)
    parts = (matrix * found.flatten()).view(len(matrix), len(again), passes).sum(-1)
    return Weights(found, expected, parts.norm(dim=0), what)


def diagnose_own_factor(weights: Weights) -> Diagnosis:
    """Return the cause of a factor of ``world_size`` if the ranks are averaged rightly, and so it is in the loss."""
    world_size, passes = weights.found.shape
    factor, averaged = weights.factor, not _differ(weights.found, torch.full_like(weights.found, 1 / world_size))
    if factor is None or world_size < 2 or not averaged:
        return Diagnosis()
    taken = f"the step has {passes} backward pass{'' if passes == 1 else 'es'} on each rank"
    if abs(factor * world_size - 1) < _UNLIKE:
        return Diagnosis(
            fits=(
                f"as world_size is {world_size}: the mean over ranks is taken, and each rank divides its own loss by "
                f"{world_size} once too often: by world_size, by the samples or tokens of all ranks, or by a number of "
                f"micro-batches that is not that of this step ({taken})",
            )
        )
    if abs(factor / world_size - 1) < _UNLIKE:
        return Diagnosis(
            fits=(
                f"as world_size is {world_size}: the mean over ranks is taken, and the gradients of each rank are "
                f"{world_size} times too large: its loss is multiplied by world_size, or is a sum over so many "
                f"micro-batches where their mean is right ({taken})",
            )
        )
    return Diagnosis()


def diagnose_weights(weights: Weights) -> Diagnosis:
    """Return how the training weighs backward passes if that differs from the right training by more than a factor."""
    if weights.factor is not None:
        return Diagnosis()
    return explain(weights, _of_clipping(weights), _of_passes_left_out(weights), _of_other_weights(weights))


def diagnose_weights_of_some(
    names: Sequence[str], again: Sequence[Given], rank: int, right: Given, allowed: float, what: str
) -> Diagnosis:
    """Return how the training weighs backward passes in some of the wrong parameters, if it does in no other way.

    The arguments are those of :func:`weights_of_passes`, which knows no weights for all of the parameters. A loss of
    several terms, of which one is weighed otherwise, has such gradients: all terms reach the other parameters.
    """
    found = {name: weights_of_passes([name], again, rank, right, allowed, what) for name in names}
    fits = {name: diagnose_weights(one).fits for name, one in found.items() if one is not None}
    texts = {name: text for name, (text, *_) in ((name, some) for name, some in fits.items() if some)}
    if len(set(texts.values())) != 1 or len(texts) == len(names):
        return Diagnosis()
    of, text = first_and_more([*texts]), next(iter(texts.values()))
    others = first_and_more([name for name in names if name not in texts])
    return Diagnosis(fits=(f"in {of}, {text}; if one term of the loss is so, {others} may be wrong by that, too",))


def _of_clipping(weights: Weights) -> Iterator[Candidate[Weights]]:
    norm = float(weights.norms.mean()) * len(weights.norms)
    yield Candidate(
        f"the gradients of each rank have the norm {norm:.4g} before they are averaged: each rank clips its own ones, "
        "and not the average",
        holds=lambda one: (
            len(one.norms) > 1 and not _differ(one.norms, one.norms.mean()) and _differ(one.found, one.found.mean())
        ),
        short="each rank clips",
    )


def _of_passes_left_out(weights: Weights) -> Iterator[Candidate[Weights]]:
    for ours, theirs, who in (
        (weights.found, weights.right, "this training"),
        (weights.right, weights.found, weights.what),
    ):
        lost = _is_zero(ours) & ~_is_zero(theirs)
        yield Candidate.when(
            f"the gradient of {weights.names(lost)} does not count in {who}: left out, overwritten or cleared, or of "
            "samples that the other training does not have",
            bool(lost.any()) and not bool((_is_zero(theirs) & ~_is_zero(ours)).any()),
        )


def _of_other_weights(weights: Weights) -> Iterator[Candidate[Weights]]:
    ranks, passes = weights.found.shape
    parts = "ranks" if passes == 1 else "micro-batches" if ranks == 1 else "ranks and their micro-batches"
    alike = not _differ(weights.found, weights.found.mean())
    ours = f"each counts {_told(weights.found[:1, :1])} times" if alike else f"they count {_told(weights.found)} times"
    why = (
        "a mean of means, which ignores the numbers of samples or tokens"
        if alike
        else "each is scaled, or divided by a number of samples or tokens, of its own"
    )
    theirs = f"{_told(weights.right)} times in that of {weights.what}"
    yield Candidate.when(f"{parts} have wrong weights: {ours} in the gradient, but {theirs}: {why}", True)


def _joined(tensors: Sequence[Tensor | None]) -> Tensor:
    parts = [torch.view_as_real(one) if one.is_complex() else one for one in tensors if one is not None]
    return torch.cat([one.double().flatten() for one in parts])


def _differ(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() > _UNLIKE * theirs.abs().max())


def _is_zero(weights: Tensor) -> Tensor:
    return weights.abs() <= _UNLIKE * weights.abs().max()


def _told(weights: Tensor) -> str:
    """Return the first weights in words, ``1.29 and 0.714``: ranks in order, and the passes of each in order."""
    *words, last = [f"{float(one):.3g}" for one in weights.flatten()[:6]]
    more = " ..." if weights.numel() > 6 else ""
    return f"{', '.join(words)} and {last}{more}" if words else last
