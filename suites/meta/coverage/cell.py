"""A cell of the matrix: a feature on simulated ranks under one semantics, compared with a single process."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdlcheck.errors import Deadlock
from pdlcheck.worlds import get_world

from .columns import SEMANTICS
from .entry import Feature

__all__ = ["FAIL", "ROUNDINGS", "Cell", "measure", "relative_error"]

FAIL = "FAIL"
ROUNDINGS = 64  # a training of three steps rounds about ten times between two comparisons


@dataclass(frozen=True)
class Cell:
    """The entry in the matrix, and the sentence that belongs below it."""

    says: str
    note: str = ""

    @property
    def failed(self) -> bool:
        return self.says == FAIL


def measure(feature: Feature, column: str, seed: int = 1) -> Cell:
    """Run a feature under the semantics of a column and compare it with a single process."""
    world = get_world("sim", seed=seed, semantics=SEMANTICS[column])
    expected = feature.errors.get(column)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's deprecations and messages about the CPU are irrelevant here
            wanted = feature.alone_under.get(column, feature.alone)()
            found = world.run(feature.program, world_size=feature.world_size)
    except Exception as error:
        told = f"{type(error).__name__}: {_first_line(error)}"
        if type(error) is not expected:
            return Cell(FAIL, told)
        note = f"{feature.why}; {told}" if feature.why else told
        return Cell("Deadlock" if expected is Deadlock else "refused", note)
    if expected is not None:
        return Cell(FAIL, f"{expected.__name__} did not come")
    try:
        off = relative_error(found, wanted, feature.rtol)
    except AssertionError as difference:
        return Cell(FAIL, _first_line(difference))
    if not feature.numerics:
        return Cell("runs")
    return Cell("=" if off is None else f"{off:.0e}", feature.why if column in feature.alone_under else "")


def relative_error(found: Any, wanted: Any, rtol: float | None = None) -> float | None:
    """Return the largest error in the numbers of ``found``, relative to the largest element of each tensor.

    Returns:
        None if every bit is the same.

    Raises:
        AssertionError: a value that is no number differs, or an error is larger than ``rtol``.
    """
    errors = [error for error in _errors("", found, wanted, rtol) if error is not None]
    return max(errors, default=None)


def _errors(where: str, found: Any, wanted: Any, rtol: float | None) -> Iterator[float | None]:
    if type(found) is not type(wanted) and not (isinstance(found, Tensor) and isinstance(wanted, Tensor)):
        raise AssertionError(f"{where or 'the result'} is {found!r}, a single process has {wanted!r}")
    if isinstance(wanted, Tensor):
        yield _error(where, found, wanted, rtol)
    elif isinstance(wanted, float):
        yield _error(where, torch.tensor(found), torch.tensor(wanted), rtol)
    elif isinstance(wanted, Mapping):
        if list(found) != list(wanted):
            raise AssertionError(f"{where} has the keys {list(found)}, a single process has {list(wanted)}")
        for key in wanted:
            yield from _errors(f"{where}[{key!r}]", found[key], wanted[key], rtol)
    elif isinstance(wanted, Sequence) and not isinstance(wanted, str | bytes):
        if len(found) != len(wanted):
            raise AssertionError(f"{where or 'the result'} has {len(found)} items, a single process {len(wanted)}")
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            yield from _errors(f"{where}[{i}]" if where else f"rank {i}", one, other, rtol)
    elif found != wanted:
        raise AssertionError(f"{where} is {found!r}, a single process has {wanted!r}")


def _error(where: str, found: Tensor, wanted: Tensor, rtol: float | None) -> float | None:
    found, wanted = found.detach(), wanted.detach()
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        told = [f"{str(x.dtype)[6:]} {tuple(x.shape)}" for x in (found, wanted)]
        raise AssertionError(f"{where} is {told[0]}, a single process has {told[1]}")
    if _bits(found) == _bits(wanted):
        return None
    if not (found.is_floating_point() or found.is_complex()):
        raise AssertionError(f"{where} is {found.tolist()}, a single process has {wanted.tolist()}")
    difference, largest = (found - wanted).abs().max().item(), wanted.abs().max().item()
    error = difference / largest if largest else math.inf
    allowed = ROUNDINGS * torch.finfo(found.dtype).eps if rtol is None else rtol
    if not error <= allowed:
        raise AssertionError(f"{where} is off by {error:.0e} of its largest element, {allowed:.0e} is allowed")
    return error


def _bits(x: Tensor) -> bytes:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
