"""What a report says, before it has a form: sections of sentences, tables, plots and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pdlcheck.bench.experiments import Plot
from pdlcheck.report.measured import Cell

__all__ = ["Block", "Chart", "Document", "Failure", "Finding", "Grid", "Line", "Picture", "Section", "Tone", "Words"]

Tone = Literal["", "good", "bad", "doubtful"]


@dataclass(frozen=True)
class Words:
    """A paragraph."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Finding:
    """A title, a verdict if there is one, and the sentence that explains it; with its plot."""

    title: str
    sentence: str
    verdict: str = ""
    tone: Tone = ""
    plot: Plot | None = None


@dataclass(frozen=True)
class Chart:
    """A plot that belongs to no single finding."""

    title: str
    plot: Plot


@dataclass(frozen=True)
class Line:
    """A line of a table; ``minor`` ones can be hidden."""

    cells: Sequence[Cell]
    tone: Tone = ""
    minor: bool = False


@dataclass(frozen=True)
class Grid:
    """A table. ``minor`` says what its minor lines are; empty if it has none. Facts by name are not for sorting."""

    title: str
    columns: Sequence[str]
    lines: Sequence[Line]
    minor: str = ""
    can_be_sorted: bool = True


@dataclass(frozen=True)
class Picture:
    """A drawing: a whole SVG, and what it shows in words."""

    title: str
    svg: str
    words: str


@dataclass(frozen=True)
class Failure:
    """The whole report of a property that fails, and the command that runs it again."""

    title: str
    report: str
    replay: str


Block = Words | Finding | Chart | Grid | Picture | Failure


@dataclass(frozen=True)
class Section:
    """A heading and what is below it."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Document:
    """A whole report. ``summary`` is what a reader with ten seconds reads."""

    title: str
    summary: Sequence[Words]
    sections: Sequence[Section]
