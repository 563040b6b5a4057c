"""Sibling cases of a failed one: they differ in one thing, so a sibling that is right shows what the fault depends on.

Siblings run only after a failure that no other cause explains. A control, which has the fault's condition, runs beside
them and must fail, or they prove nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, cycle, islice
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.checks.diagnosis import Candidate
from pdlcheck.checks.sharded_layer.causes import Cause
from pdlcheck.checks.sharded_layer.passes import Cut, Pass, Select, Tensors, on_a_rank, select_of, whole_pass
from pdlcheck.checks.tolerances import Tolerance
from pdlcheck.operations.words import listed, who

__all__ = ["Sibling", "Trial", "of_shares", "of_strides"]

Right: TypeAlias = Callable[[Pass, Sequence[Cut]], bool]

_READS = "memory is read without its strides, or with those of another tensor, as by as_strided or data_ptr"
_NUMBERS = (
    "unlike numbers of samples are not taken into account, as in a mean of the ranks' means, or in a division by "
    "world_size times the rank's own number"
)
_OTHER_RANKS = "a rank uses its own values, or those of a wrong rank, in place of those of another rank or of all ranks"
_EMPTY = "the code does not provide for a rank without samples"
_NAN = "; NaN is 0 / 0, as the mean of no samples or the unbiased variance of one"


@dataclass(frozen=True)
class Sibling:
    """A batch, its right results, and the parts of it that ranks are given and must return."""

    truth: Pass
    inputs_of: Select | None
    output_of: Select | None


@dataclass(frozen=True)
class Trial:
    """The means to run siblings.

    Args:
        world: where the ranks run.
        world_size: number of ranks.
        shard: makes the module of a rank.
        layer: the whole layer.
        dtype: of the computation.
        sync: called after each backward pass.
        near: the tolerance.
        right: returns whether the results of all ranks are right.
    """

    world: Any
    world_size: int
    shard: Callable[[nn.Module], nn.Module]
    layer: nn.Module
    dtype: torch.dtype
    sync: Callable[[nn.Module], object] | None
    near: Tolerance
    right: Right

    def whole(self, like: Pass, inputs: Tensors, gradients: Tensors | None = None) -> Pass:
        """Return one pass of a copy of the whole layer, which compares the gradients that the pass ``like`` does."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return whole_pass(copy.deepcopy(self.layer), inputs, gradients, like.learns)

    def run(self, siblings: Sequence[Sibling]) -> list[list[Cut]]:
        """Return the results of all ranks for each sibling."""
        rest = self.shard, self.layer, self.dtype, siblings, self.sync
        ranks: list[list[Cut]] = self.world.run(_each_on_a_rank, *rest, world_size=self.world_size)
        return [list(cuts) for cuts in zip(*ranks, strict=True)]

    def verdicts(self, siblings: Sequence[Sibling]) -> list[bool]:
        """Return whether each sibling is right.

        The first one is the control, which runs again after the others. If it is right, or if any raises an error, no
        sibling proves anything, so all are False.
        """
        cases = [*siblings, siblings[0]]
        with suppress(Exception):  # such as the deadlock of a layer that knows only the first case
            *found, last = [self.right(one.truth, cuts) for one, cuts in zip(cases, self.run(cases), strict=True)]
            if not found[0] and not last:
                return found
        return [False] * len(siblings)


def _each_on_a_rank(
    shard: Callable[[nn.Module], nn.Module],
    layer: nn.Module,
    dtype: torch.dtype,
    siblings: Sequence[Sibling],
    sync: Callable[[nn.Module], object] | None,
) -> list[Cut]:
    return [on_a_rank(shard, layer, dtype, [one.truth], one.inputs_of, one.output_of, sync) for one in siblings]


@dataclass(frozen=True)
class _Laid:
    """A selection whose result has the same values in another order in memory.

    Args:
        select: the selection.
        swapped: two dimensions that are exchanged in memory; two equal ones make the result contiguous.
    """

    select: Select | None
    swapped: tuple[int, int]

    def __call__(self, *tensors: Tensor) -> Tensors:
        return tuple(self._laid(x) for x in select_of(self.select, tensors, "the selection"))

    def _laid(self, x: Tensor) -> Tensor:
        if max(self.swapped) >= x.dim():
            return x
        return x.transpose(*self.swapped).contiguous().transpose(*self.swapped)


def of_strides(trial: Trial, failed: Sibling, where: str) -> Iterator[Cause]:
    """Yield a cause if the result depends on strides: with the same values in another order in memory it is right.

    Args:
        trial: runs siblings.
        failed: the case that fails.
        where: the part of the code that has the fault, if that is known.
    """
    inputs = {
        f"of its inputs: {_in_words(swapped)}": replace(failed, inputs_of=_Laid(failed.inputs_of, swapped))
        for swapped in _orders(failed.truth.inputs)
    }
    gradients = {
        f"of the gradient of its output: {_in_words(swapped)}": replace(
            failed, output_of=_Laid(failed.output_of, swapped)
        )
        for swapped in _orders(failed.truth.outputs)
    }
    for tried in filter(None, (inputs, gradients)):  # one after the other: view() raises an error for many strides
        _, *right = trial.verdicts([failed, *tried.values()])
        text = next((text for text, is_right in zip(tried, right, strict=True) if is_right), "")
        told = f"it depends on the strides {text}, the same values give the right result; {_READS}{where}"
        yield Candidate(told, holds=lambda _, found=bool(text): found, short="strides")  # type: ignore[misc]
        if text:
            return


def _orders(tensors: Tensors) -> list[tuple[int, int]]:
    dims = max((x.dim() for x in tensors), default=0)
    return [(0, 0), *combinations(range(dims), 2)] if dims > 1 else []


def _in_words(swapped: tuple[int, int]) -> str:
    return (
        f"with dimensions {swapped[0]} and {swapped[1]} exchanged in memory" if any(swapped) else "in contiguous memory"
    )


@dataclass(frozen=True)
class _Rows:
    """The selection of some rows, which are those of dimension 0, on each rank."""

    of_ranks: Sequence[Sequence[int]]

    def __call__(self, *tensors: Tensor) -> Tensors:
        rows = list(self.of_ranks[dist.get_rank()])
        return tuple(x[rows] for x in tensors)


def _rows_on_a_rank(failed: Sibling) -> tuple[list[int] | None, list[int] | None]:
    return _rows_of(failed.inputs_of, failed.truth.inputs), _rows_of(failed.output_of, failed.truth.outputs)


def _rows_of(select: Select | None, tensors: Tensors) -> list[int] | None:
    """Return the rows that a selection takes from each tensor.

    The result is None if it takes other rows from another tensor, or parts of rows.
    """
    if any(not x.dim() for x in tensors):
        return None
    numbered = tuple(
        torch.arange(len(x), dtype=x.dtype if x.is_floating_point() else torch.int64)
        .view(-1, *[1] * (x.dim() - 1))
        .expand(x.shape)
        .clone()
        for x in tensors
    )
    taken = select_of(select, numbered, "the selection")
    if len(taken) != len(tensors):
        return None
    rows: list[list[int]] = []
    for part, x in zip(taken, tensors, strict=True):
        if part.dim() != x.dim() or part.shape[1:] != x.shape[1:] or not x[:1].numel():
            return None
        flat = part.reshape(len(part), x[0].numel())
        if (flat != flat[:, :1]).any():
            return None
        rows.append([int(number) for number in flat[:, 0]])
    return rows[0] if all(one == rows[0] for one in rows) else None


@dataclass(frozen=True)
class _Shares:
    """The division of samples over ranks.

    Args:
        of_ranks: the rows of each rank, which are all of the batch.
        whole_output: True if each rank returns the output for all rows.
    """

    of_ranks: list[list[int]]
    whole_output: bool

    def repeated(self, size: int) -> list[int]:
        """Return so many rows, in the order of ranks; they begin again after the last one."""
        return list(islice(cycle(row for rows in self.of_ranks for row in rows), size))

    def sibling(
        self, trial: Trial, failed: Sibling, rows: Sequence[int], sizes: Sequence[int], *, alike: bool = False
    ) -> Sibling:
        """Return the case in which ranks hold ``sizes`` of the ``rows``, which are all the whole layer is given.

        If ``alike``, ranks hold the same samples, and begin the backward pass with the same gradients.
        """
        ends = list(accumulate(sizes))
        division = _Rows([range(end - size, end) for end, size in zip(ends, sizes, strict=True)])
        truth = trial.whole(failed.truth, tuple(x[list(rows)] for x in failed.truth.inputs))
        if alike:
            gradients = tuple(torch.cat([g[: sizes[0]]] * len(sizes)) for g in truth.gradients_of_output)
            truth = trial.whole(truth, truth.inputs, gradients)
        return Sibling(truth, division, None if self.whole_output else division)


def _shares(trial: Trial, failed: Sibling) -> _Shares | None:
    """Return the division of a case; None if ranks do not hold different whole rows."""
    with suppress(Exception):  # a function of the user that takes no other values than those of the batch
        ranks = trial.world.run(_rows_on_a_rank, failed, world_size=trial.world_size)
        given, returned = [rows for rows, _ in ranks], [rows for _, rows in ranks]
        every = sorted(row for rows in given for row in rows)
        if every == list(range(len(failed.truth.inputs[0]))):
            if returned == given:
                return _Shares(given, whole_output=False)
            if all(rows == list(range(len(failed.truth.outputs[0]))) for rows in returned):
                return _Shares(given, whole_output=True)
    return None


def of_shares(trial: Trial, failed: Sibling, where: str, nan: bool) -> Iterator[Cause]:
    """Yield a cause if the fault depends on how many samples each rank holds, or on whose samples statistics are of.

    Args:
        trial: runs siblings.
        failed: the case that fails.
        where: the part of the code that has the fault, if that is known.
        nan: whether the wrong value is NaN.
    """
    shares = _shares(trial, failed)
    if shares is None:
        return
    sizes = [len(rows) for rows in shares.of_ranks]
    each = -(-sum(sizes) // len(sizes))
    if len(set(sizes)) > 1:
        text = ""
        with suppress(Exception):  # of a whole layer that takes no other number of samples
            text = _dependence_on_sizes(trial, shares, failed, sizes, each)
        short = "unlike numbers of samples"
        yield Candidate(f"{text}{_NAN if nan else ''}{where}", holds=lambda _: bool(text), short=short)
        if text:
            return
    if each > 1 and not shares.whole_output:
        yield (
            _of_values_of_ranks(trial, shares, failed, each, where)
            if where
            else _of_own_samples(trial, shares, failed, each)
        )


def _dependence_on_sizes(trial: Trial, shares: _Shares, failed: Sibling, sizes: list[int], each: int) -> str:
    """Return the cause of a fault that depends on the numbers of samples; empty if it does not."""
    most, ranks = max(sizes), len(sizes)
    rows = shares.repeated(each * ranks)
    unlike = [size + (len(rows) - sum(sizes)) * (rank == sizes.index(most)) for rank, size in enumerate(sizes)]
    cases = [(rows, unlike), (rows, [each] * ranks), (shares.repeated(most * ranks), [most] * ranks)]
    if 0 in sizes and each > 1:
        cases.append((rows, _filled(unlike)))
    _, even, full, *filled = trial.verdicts([shares.sibling(trial, failed, *one) for one in cases])
    if any(filled):
        none = [rank for rank, size in enumerate(sizes) if not size]
        holds = f"{who([none])} {'holds' if len(none) == 1 else 'hold'}"
        return f"{holds} no samples: with a sample on every rank it is right; {_EMPTY}"
    if even and full:
        return f"ranks hold {listed(sizes)} samples: with {each} on every rank it is right; {_NUMBERS}"
    return ""


def _filled(sizes: Sequence[int]) -> list[int]:
    """Return sizes with the same sum and no zero."""
    filled = list(sizes)
    while 0 in filled:
        filled[filled.index(max(filled))] -= 1
        filled[filled.index(0)] = 1
    return filled


def _of_own_samples(trial: Trial, shares: _Shares, failed: Sibling, each: int) -> Cause:
    """Return the cause of a layer in which each rank uses the mean or variance of its own samples.

    Ranks have ``each`` samples. Such a layer is right if all ranks hold the same ones, and its ranks return different
    outputs for one sample.
    """
    even = [each] * trial.world_size
    rows = shares.repeated(sum(even))
    first = [row if number % each else rows[0] for number, row in enumerate(rows)]  # each rank has the same first one
    holds = False
    with suppress(Exception):  # of a layer that does not take such samples
        if _uses_moments(trial, failed.truth, rows[:each]):
            different = shares.sibling(trial, failed, rows, even)
            same = shares.sibling(trial, failed, rows[:each] * len(even), even, alike=True)
            if trial.verdicts([different, same])[1]:
                (cuts,) = trial.run([shares.sibling(trial, failed, first, even)])
                outputs = [cut.passes[0].outputs for cut in cuts]
                holds = not all(_alike(one, outputs[0], trial.near) for one in outputs)
    return Candidate.when(
        "each rank uses a mean or variance of its own samples: with the same samples on every rank it is right, and "
        "ranks return different outputs for one sample",
        holds,
    )


def _of_values_of_ranks(trial: Trial, shares: _Shares, failed: Sibling, each: int, where: str) -> Cause:
    """Return the cause of a backward pass that is right if all ranks hold the same samples, and the same gradients."""
    even = [each] * trial.world_size
    rows = shares.repeated(sum(even))
    holds = False
    with suppress(Exception):  # of a layer that does not take such samples
        different = shares.sibling(trial, failed, rows, even)
        same = shares.sibling(trial, failed, rows[:each] * len(even), even, alike=True)
        holds = trial.verdicts([different, same])[1]
    return Candidate(
        f"with the same samples on every rank it is right: {_OTHER_RANKS}{where}",
        holds=lambda _: holds,
        short="values of another rank",
    )


def _uses_moments(trial: Trial, truth: Pass, some: Sequence[int]) -> bool:
    """Return whether outputs of the whole layer depend on other samples, but only on their means and covariances.

    These stay the same if all samples but one are reflected at their mean; so does the output for that one.
    """
    inputs = truth.inputs
    if len(inputs[0]) < 3 or not all(x.is_floating_point() for x in inputs):
        return False
    reflected = tuple(torch.cat([x[:1], 2 * x[1:].mean(0, keepdim=True) - x[1:]]) for x in inputs)
    whole, others = (trial.whole(truth, each).outputs for each in (inputs, reflected))
    alone = trial.whole(truth, tuple(x[list(some)] for x in inputs)).outputs
    selected = tuple(y[list(some)] for y in whole)
    return _alike(others, whole, trial.near) and not _alike(alone, selected, trial.near, rows=len(some))


def _alike(some: Tensors, others: Tensors, near: Tolerance, rows: int = 1) -> bool:
    """Return whether the first rows of tensors are alike."""
    return all(bool(near.accepts(a[:rows], b[:rows]).all()) for a, b in zip(some, others, strict=True))
