"""``--compare-world-sizes``: what a program prints and saves must not depend on the number of ranks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pdlcheck.errors import PdlcheckError

__all__ = ["DependsOnWorldSize", "Results", "difference"]

_LABEL = r"[A-Za-z_/. -]*(?:loss|acc|error|norm|ppl|perplexity)[A-Za-z_]*"
_NUMBER = re.compile(rf"({_LABEL})\W{{1,4}}(-?\d+\.?\d*(?:e[-+]?\d+)?)", re.IGNORECASE)
_CLOSE = 1e-3  # relative; rounding of float32 in another order, over some steps


class DependsOnWorldSize(PdlcheckError):
    """A program whose losses or weights depend on the number of ranks. Fields: ``sizes``, ``name``."""

    sizes: Sequence[int]
    name: str


@dataclass
class Results:
    """What one run has printed and saved.

    Args:
        printed: the numbers after words such as ``loss``, by these words, in the order of printing.
        saved: the tensors, by file and name.
    """

    printed: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    saved: Mapping[str, Tensor] = field(default_factory=dict)

    def read(self, line: str) -> None:
        """Take the numbers of a line that a rank has printed."""
        for label, number in _NUMBER.findall(line):
            self.printed[label.strip().lower()].append(float(number))

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to compare."""
        return not self.printed and not self.saved


def difference(one_size: int, one: Results, size: int, other: Results) -> DependsOnWorldSize | None:
    """Return the first difference between the results on two numbers of ranks; None if there is none."""
    where = f"on {_ranks(size)}", f"on {_ranks(one_size)}"
    for label, before in one.printed.items():
        now = other.printed.get(label, [])
        if len(now) != len(before):
            return _error(
                (one_size, size),
                label,
                f"{label!r} is printed {len(now)} times {where[0]} and {len(before)} times {where[1]}: "
                "does the number of samples in a step depend on the number of ranks?",
            )
        for number, (a, b) in enumerate(zip(before, now, strict=True), 1):
            if abs(a - b) > _CLOSE * max(abs(a), abs(b)):
                words = f"{label!r}, printed for the {number}. time, is {b:g} {where[0]} and {a:g} {where[1]}"
                return _error((one_size, size), label, words)
    for name, tensor in one.saved.items():
        found = other.saved.get(name)
        if found is None or found.shape != tensor.shape:
            shape = "missing" if found is None else f"of shape {tuple(found.shape)}"
            return _error(
                (one_size, size), name, f"{name} is {shape} {where[0]}, and of shape {tuple(tensor.shape)} {where[1]}"
            )
        apart = float((found - tensor).norm() / tensor.norm().clamp_min(1e-30))
        if not apart <= _CLOSE:
            words = f"{name} differs by {apart:.2g} of its norm between the run {where[0]} and the run {where[1]}"
            return _error((one_size, size), name, words)
    return None


def _error(sizes: Sequence[int], name: str, words: str) -> DependsOnWorldSize:
    return DependsOnWorldSize(words, sizes=tuple(sizes), name=name)


def _ranks(number: int) -> str:
    return f"{number} rank{'' if number == 1 else 's'}"
