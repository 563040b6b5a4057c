"""The content of a report, independent of its output format: sections of sentences, tables, plots and pictures."""

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
    """A title, a verdict if there is one, the sentence that explains it, and its plot."""

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
    """A line of a table; ``minor`` lines can be hidden."""

    cells: Sequence[Cell]
    tone: Tone = ""
    minor: bool = False


@dataclass(frozen=True)
class Grid:
    """A table.

    ``minor`` describes its minor lines; empty if it has none. ``can_be_sorted`` is False for a table of facts by name.
    """

    title: str
    columns: Sequence[str]
    lines: Sequence[Line]
    minor: str = ""
    can_be_sorted: bool = True


@dataclass(frozen=True)
class Picture:
    """A drawing: a whole SVG, and a description in words."""

    title: str
    svg: str
    words: str


@dataclass(frozen=True)
class Failure:
    """The full report of a failing property, and the command that runs it again."""

    title: str
    report: str
    replay: str


Block = Words | Finding | Chart | Grid | Picture | Failure


@dataclass(frozen=True)
class Section:
    """A heading with its content."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Document:
    """A whole report. ``summary`` is for a reader who has ten seconds."""

    title: str
    summary: Sequence[Words]
    sections: Sequence[Section]
