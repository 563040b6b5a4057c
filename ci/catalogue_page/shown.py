"""The outcome of one run of a program, in a few words."""

from __future__ import annotations

import math
import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pdlcheck.errors import PdlcheckError, RankDied, RankFailed, RankTimeout

__all__ = ["Shown", "classify", "in_words", "same_values"]

WORDS = 110
_WHERE = re.compile(r"^(\[[^\]]*\][\s:]*)+")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_WHAT = re.compile(r"what\(\):\s*(.+)")


@dataclass(frozen=True)
class Shown:
    """One outcome. ``kind`` is ``hangs``, ``dies``, ``error``, ``wrong values silently``, ``silent`` or a verdict."""

    kind: str
    detail: str = ""

    @property
    def text(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


def classify(outcome: BaseException | Sequence[Any], right: Sequence[Any]) -> Shown:
    """Classify the outcome of a run.

    Args:
        outcome: the error, or the results of the ranks.
        right: the results of the correct twin.
    """
    if isinstance(outcome, RankTimeout):
        return Shown("hangs")
    if isinstance(outcome, RankDied):
        return Shown("dies", _death(outcome))
    if isinstance(outcome, RankFailed):  # an exception that cannot be pickled, such as SystemExit
        return Shown("error", _first_words(str(outcome)))
    if isinstance(outcome, PdlcheckError):
        return Shown(type(outcome).__name__)
    if isinstance(outcome, BaseException):
        return Shown("error", f"{type(outcome).__name__}: {_first_words(str(outcome))}")
    # a faulty program may return nothing on a rank where its twin returns the result of a wait, for example
    compared = [pair for pair in zip(outcome, right, strict=True) if all(value is not None for value in pair)]
    return Shown("silent" if all(same_values(one, other) for one, other in compared) else "wrong values silently")


def _death(error: RankDied) -> str:
    code = error.exitcode
    how = "no exit code" if code is None else signal.Signals(-code).name if code < 0 else f"exit code {code}"
    said = _WHAT.search(error.stderr or "")
    return f"{how}, {_first_words(said[1])}" if said else how


def _first_words(text: str) -> str:
    """Return the first line without addresses and without the place in torch's source, cut at a word."""
    line = _ADDRESS.sub("", _WHERE.sub("", text.strip().partition("\n")[0]))
    return line if len(line) <= WORDS else line[:WORDS].rpartition(" ")[0] + " ..."


def in_words(runs: Sequence[Shown]) -> str:
    """Join all runs in one cell: ``hangs``, or ``hangs 2 of 3, else silent``."""
    counted = Counter(run.kind for run in runs).most_common()
    texts = {run.kind: run.text for run in reversed(runs)}  # the first run of a kind represents it
    if len(counted) == 1:
        return texts[counted[0][0]]
    *often, (last, _) = counted
    return ", ".join(f"{texts[kind]} {number} of {len(runs)}" for kind, number in often) + f", else {texts[last]}"


def same_values(one: Any, other: Any) -> bool:
    """Return whether two values are equal up to rounding, also inside lists, tuples and dicts."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and same_values(one.tolist(), other.tolist())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_values, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_values(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)
