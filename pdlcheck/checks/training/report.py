"""The verdicts on the properties of a training, as one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = ["Row", "TrainingReport", "Verdict"]

Verdict: TypeAlias = Literal["right", "wrong", "not compared", "not run"]

_TITLES = ("property", "check", "verdict", "cases", "seconds")


@dataclass
class Row:
    """The verdict on one property.

    Args:
        name: the property.
        check: the name of the check.
        verdict: ``right``, ``wrong``, ``not compared`` if there was nothing to compare, or ``not run``.
        note: the likely cause of what is wrong, or what was found if no cause is known; or the reason why nothing was
            compared.
        seen: the conditions of the check, and whether a run has met them.
        cases: the cases that ran, in words.
        seconds: the time of all cases.
        error: the failure.
    """

    name: str
    check: str
    verdict: Verdict = "not run"
    note: str | None = None
    seen: dict[str, bool] = field(default_factory=dict)
    cases: list[str] = field(default_factory=list)
    seconds: float = 0.0
    error: Exception | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the columns of the table."""
        return self.name, self.check, self.verdict, str(len(self.cases)), f"{self.seconds:.1f}"

    @property
    def label(self) -> str:
        """Return the word before the note."""
        if self.verdict != "wrong":
            return "reason"
        return "found" if getattr(self.error, "cause", None) is None else "likely cause"

    @property
    def unseen(self) -> list[str]:
        """Return the conditions that no run has met."""
        return [words for words, is_met in self.seen.items() if not is_met]


@dataclass(frozen=True)
class TrainingReport:
    """The verdicts on all properties that the parts of a training allow to check."""

    rows: Sequence[Row]

    def count(self, verdict: Verdict) -> int:
        """Return the number of properties with this verdict."""
        return sum(row.verdict == verdict for row in self.rows)

    def __str__(self) -> str:
        """Return the table; below each row its cause or reason, and what was not seen."""
        cells = [_TITLES, *(row.cells for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
        told = [lines[0].rstrip()]
        for line, row in zip(lines[1:], self.rows, strict=True):
            told.append(line.rstrip())
            told += [f"    {row.label}: {row.note}"] if row.note else []
            told += [f"    not seen: {', '.join(row.unseen)}"] if row.unseen and row.verdict == "right" else []
        return "\n".join(told)
