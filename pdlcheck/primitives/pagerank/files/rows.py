"""The reader of edges between named nodes, and of quoted fields, with the standard library's csv."""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterator
from itertools import islice

import numpy as np

from pdlcheck.primitives.pagerank.files.columns import Columns, GrowingColumns, Progress
from pdlcheck.primitives.pagerank.files.layout import INTEGER, NUMBER, TextLayout, split_fields
from pdlcheck.primitives.pagerank.files.lines import (
    EMPTY_ID,
    FEW_FIELDS,
    HUGE_ID,
    MANY_FIELDS,
    NEGATIVE_ID,
    NEGATIVE_WEIGHT,
    NOT_A_WEIGHT,
    NOT_AN_ID,
    ONE_FIELD,
    PROBLEMS,
)
from pdlcheck.primitives.pagerank.files.source import Source
from pdlcheck.primitives.pagerank.files.text import blocks_of, shown
from pdlcheck.primitives.pagerank.memory import require_free_memory

__all__ = ["read_rows"]

ROWS = 1 << 16
NAME_NBYTES = 200  # bytes of a short name: the object, and its item in the dict of numbers
LONGEST_ID = 2**63


def read_rows(source: Source, layout: TextLayout, *, strict: bool, progress: Progress | None = None) -> Columns:
    """Return the edges of text whose ids are names, or whose fields are quoted.

    Names are numbered in order of their first edge. Arguments and errors are those of :func:`read_integers`.
    """
    growing, numbers = GrowingColumns(source.name), {}  # type: tuple[GrowingColumns, dict[str, int]]
    lines = _Lines(source, layout)
    rows = _rows(lines, layout.delimiter)
    while True:
        src, dst, weights, largest = array("q"), array("q"), array("d"), -1
        for fields in islice(rows, ROWS):
            try:
                ends = fields[layout.src], fields[layout.dst]
                weight = fields[layout.weight] if layout.weight >= 0 else ""
            except IndexError:
                raise lines.error(ONE_FIELD if len(fields) == 1 else FEW_FIELDS) from None
            if strict and len(fields) != layout.width:
                raise lines.error(FEW_FIELDS if len(fields) < layout.width else MANY_FIELDS)
            u, v = ends[0].strip(), ends[1].strip()
            if layout.integers:
                src.append(lines.integer(u))
                dst.append(lines.integer(v))
                largest = max(largest, src[-1], dst[-1])
            else:
                if not u or not v:
                    raise lines.error(EMPTY_ID)
                src.append(numbers.setdefault(u, len(numbers)))
                dst.append(numbers.setdefault(v, len(numbers)))
            if layout.weight >= 0:
                weights.append(lines.weight(weight.strip()))
        if not src:
            break
        if not layout.integers:
            largest = len(numbers) - 1
            what = f"{source.name}: the names of {len(numbers)} nodes"
            require_free_memory(what, NAME_NBYTES * len(numbers) // 8, "number the nodes")
        ids = np.frombuffer(src, np.int64), np.frombuffer(dst, np.int64)
        growing.add(*ids, np.frombuffer(weights, np.float64) if layout.weight >= 0 else None, largest, source.share)
        if progress is not None:
            progress(source.position, source.total)
    return growing.columns(None if layout.integers else tuple(numbers))


class _Lines:
    """The lines of the source that are neither empty nor comments, as text; ``number`` counts all lines."""

    def __init__(self, source: Source, layout: TextLayout) -> None:
        self._source, self._begin = source, layout.begin
        self.number, self.line = layout.line, b""

    def __iter__(self) -> Iterator[str]:
        for block in blocks_of(self._source, self._begin):
            for line in block[:-1].split(b"\n"):
                self.number += 1
                begin = line.lstrip()[:1]
                if begin in (b"#", b"%", b""):
                    continue
                self.line = line
                try:
                    yield line.decode() + "\n"
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"{self._source.name}:{self.number}: {error.reason} in UTF-8; convert the file with iconv; the "
                        f"line is {shown(line)}"
                    ) from None

    def error(self, problem: int | str) -> ValueError:
        """Return the error for the line that was read last."""
        said = PROBLEMS[problem] if isinstance(problem, int) else problem
        return ValueError(f"{self._source.name}:{self.number}: {said}; the line is {shown(self.line)}")

    def integer(self, field: str) -> int:
        """Return the id in ``field``."""
        if not INTEGER.fullmatch(field):
            raise self.error(NOT_AN_ID if field else EMPTY_ID)
        value = int(field)
        if not 0 <= value < LONGEST_ID:
            raise self.error(NEGATIVE_ID if value < 0 else HUGE_ID)
        return value

    def weight(self, field: str) -> float:
        """Return the weight in ``field``."""
        if not NUMBER.fullmatch(field):
            raise self.error(NOT_A_WEIGHT)
        value = float(field)
        if value < 0:
            raise self.error(NEGATIVE_WEIGHT)
        if math.isinf(value):
            raise self.error("a weight is beyond 1.8e308, the largest float64; scale them all, this changes no rank")
        return abs(value)


def _rows(lines: _Lines, delimiter: str | None) -> Iterator[list[str]]:
    try:
        if delimiter is None:
            for line in lines:
                yield split_fields(line, None)
        else:
            yield from csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
    except csv.Error as error:
        raise lines.error(f"{error}; double a quote that is part of a name, and close each quote") from error
