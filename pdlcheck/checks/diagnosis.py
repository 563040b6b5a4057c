"""The likely cause of a failure: the candidates of a table that explain everything that is wrong.

A check has tables of candidates. A new cause is one line in a table, and one test. The engine decides which candidates
fit, and says so if several do. If none does, it names what is excluded, and gives no cause.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pdlcheck.checks.tolerances import EXACT, Tolerance, distance

__all__ = ["Candidate", "Diagnosis", "explain", "predictions"]

Found = TypeVar("Found")  # a tensor, tensors by name, or any evidence that predicates are asked about
Tolerances = Tolerance | Mapping[Hashable, Tolerance]

_SHOWN = 3
_CLOSER = 4.0  # a prediction must be so many times closer to what was found than the right value is
_VAGUE = ("it is ", "it was ", "they were ", "they are ", "these are ")  # beginnings that a list of names does not need


@dataclass(frozen=True)
class Candidate(Generic[Found]):
    """A possible cause: its text, and either what it predicts or a predicate over what was found.

    Args:
        text: the cause, as users read it. The part before the first colon is its name where it is excluded.
        predict: returns what would be found if the text were true.
        holds: returns whether the text is true of what was found.
        short: the name, if the part before the first colon is none.
    """

    text: str
    predict: Callable[[], Found] | None = None
    holds: Callable[[Found], bool] | None = None
    short: str = ""

    def __post_init__(self) -> None:
        """Validate that there is exactly one of ``predict`` and ``holds``."""
        if (self.predict is None) == (self.holds is None):
            raise TypeError(f"a candidate has either predict= or holds=: {self.text!r}")

    @classmethod
    def of(cls, text: str, predicted: Found) -> Candidate[Found]:
        """Return a candidate with a prediction that is already known."""
        return cls(text, lambda: predicted)

    @classmethod
    def when(cls, text: str, true: bool) -> Candidate[Found]:
        """Return a candidate whose predicate has been evaluated already."""
        return cls(text, holds=lambda _: true)

    @property
    def name(self) -> str:
        """Return the short name, or the text up to the first colon, without a vague beginning."""
        name = self.short or self.text.split(":")[0]
        start = next((start for start in _VAGUE if name.startswith(start)), "")
        return name.removeprefix(start)


@dataclass(frozen=True)
class Diagnosis:
    """The result of a search for the cause.

    Args:
        fits: the texts of the candidates that explain what was found.
        excluded: the names of the others, if none fits.
        hints: observations that are true and may help, but that prove no cause; empty if a candidate fits.
    """

    fits: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()

    @property
    def cause(self) -> str | None:
        """Return the causes that fit, in words; None if none does.

        Example:
            >>> Diagnosis(("it is the sum", "it was reduced twice")).cause
            '2 causes fit: (1) it is the sum; (2) it was reduced twice'
        """
        if len(self.fits) < 2:
            return self.fits[0] if self.fits else None
        listed = "; ".join(f"({number}) {text}" for number, text in enumerate(self.fits[:_SHOWN], start=1))
        more = len(self.fits) - _SHOWN
        return f"{len(self.fits)} causes fit: {listed}{f'; and {more} more' if more > 0 else ''}"

    def __str__(self) -> str:
        """Return the causes that fit, or what is excluded.

        Example:
            >>> print(Diagnosis(excluded=("zero", "the sum"), hints=("the model draws random numbers",)))
            no known cause fits; excluded: "zero", "the sum"; note: the model draws random numbers
        """
        if self.cause is not None:
            return self.cause
        listed = ", ".join(f'"{name}"' for name in self.excluded[:_SHOWN])
        more = len(self.excluded) - _SHOWN
        parts = ["no known cause fits"]
        if listed:
            parts.append(f"excluded: {listed}{f' and {more} more' if more > 0 else ''}")
        if self.hints:
            parts.append(f"note: {'; '.join(self.hints)}")
        return "; ".join(parts)


def predictions(table: Iterable[tuple[str, Found]]) -> Iterator[Candidate[Found]]:
    """Yield a candidate for each pair of a text and what it predicts."""
    for text, predicted in table:
        yield Candidate.of(text, predicted)


def explain(
    found: Found,
    *tables: Iterable[Candidate[Found]],
    tolerance: Tolerances = EXACT,
    expected: Found | None = None,
    wrong: Tensor | None = None,
    hints: Iterable[Candidate[Found]] = (),
) -> Diagnosis:
    """Return which candidates explain ``found``: all of its elements, not only the first wrong one.

    A prediction that differs from ``found`` in one element by more than the tolerance is excluded. So is one that is
    hardly closer to ``found`` than ``expected`` is, such as a factor of 1, or any factor of an expected zero. What is
    found to be exactly zero is explained only by a prediction of exactly zero, not by a small factor.

    Args:
        found: a tensor, or tensors by name; all of them are wrong. For predicates alone it may be any evidence.
        *tables: the candidates. A later table, of rarer causes or of costly predictions, is tried only if no candidate
            of an earlier one fits.
        tolerance: the allowed distance from a prediction; by name if ``found`` has names.
        expected: the right value, in the form of ``found``.
        wrong: the mask of the wrong elements of a tensor; None compares all elements.
        hints: observations for the case that no candidate fits.

    Example:
        >>> held, right = torch.tensor([4.0, 8.0]), torch.tensor([2.0, 4.0])
        >>> table = [Candidate("it is the sum", lambda: right * 2), Candidate("it is zero", lambda: right * 0)]
        >>> print(explain(held, table, expected=right))
        it is the sum
    """
    excluded: dict[str, None] = {}
    for table in tables:
        fits: dict[str, None] = {}
        for candidate in table:
            if _fits(candidate, found, tolerance, expected, wrong):
                fits[candidate.text] = None
            else:
                excluded[candidate.name] = None
        if fits:
            return Diagnosis(fits=tuple(fits))
    true = dict.fromkeys(hint.text for hint in hints if _fits(hint, found, tolerance, None, wrong))
    return Diagnosis(excluded=tuple(excluded), hints=tuple(true))


def _fits(
    candidate: Candidate[Found],
    found: Found,
    tolerance: Tolerances,
    expected: Found | None,
    wrong: Tensor | None,
) -> bool:
    if candidate.holds is not None:
        return candidate.holds(found)
    assert candidate.predict is not None  # a candidate has one of the two
    parts, goals = _by_name(found), _by_name(candidate.predict())
    rights = {} if expected is None else _by_name(expected)
    for name, held in parts.items():
        goal, right = goals.get(name), rights.get(name)
        allowed = tolerance if isinstance(tolerance, Tolerance) else tolerance[name]
        if goal is None or not _explains(held, goal, allowed, right, wrong):
            return False
    return True


def _explains(held: Tensor, goal: Tensor, tolerance: Tolerance, right: Tensor | None, wrong: Tensor | None) -> bool:
    """Return whether a prediction explains one wrong tensor."""
    if held.shape != goal.shape:
        return False
    mask = torch.ones_like(held, dtype=torch.bool) if wrong is None else wrong
    if not bool(tolerance.accepts(held, goal)[mask].all()):
        return False
    if not bool(held[mask].any()) and bool(goal[mask].any()):
        return False
    if right is None or right.shape != held.shape:
        return True
    off, wanted = (float(distance(held, other)[mask].norm()) for other in (goal, right))
    return off < wanted and _CLOSER * off <= wanted


def _by_name(value: object) -> dict[Hashable, Tensor]:
    """Return the tensors by name; a single tensor or number has the name None."""
    parts = value if isinstance(value, Mapping) else {None: value}
    return {name: part if isinstance(part, Tensor) else torch.as_tensor(part) for name, part in parts.items()}
