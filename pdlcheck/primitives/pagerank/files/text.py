"""The reader of edges between integer ids in text: two threads parse blocks into arrays that grow in place."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdlcheck.primitives.pagerank.files.columns import Columns, GrowingColumns, Progress
from pdlcheck.primitives.pagerank.files.layout import TextLayout
from pdlcheck.primitives.pagerank.files.lines import PROBLEMS, copy_fields, count_lines, parse_lines
from pdlcheck.primitives.pagerank.files.source import Source

__all__ = ["blocks_of", "read_integers", "shown"]

BLOCK_NBYTES = 4 << 20
THREADS = 2
SHOWN = 60  # characters of a wrong line in an error
USUAL_WEIGHT = 32  # characters, at most; longer weights are parsed one by one
WEIGHT = re.compile(rb"[-+.0-9eE]+")


@dataclass(frozen=True, eq=False)
class _Parsed:
    """One block: its edges, and the first wrong line in it."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    weights: NDArray[np.float64] | None
    lines: int
    largest: int
    problem: str | None
    line: int
    shown: str


def read_integers(source: Source, layout: TextLayout, *, strict: bool, progress: Progress | None = None) -> Columns:
    """Return the edges of text whose ids are integers. In addition to the columns it holds a few blocks of 4 MB.

    Args:
        source: the text, of which no line was read before.
        layout: the places of the fields.
        strict: every line must have as many fields as the first edge.
        progress: called with the bytes read so far, and with those of the whole file.

    Raises:
        ValueError: a line is no edge; the message has the file, the number of the line and the cure. Or a compressed
            file is truncated.
        MemoryError: the edges do not fit in memory; their number is estimated from the length of the file.
    """
    growing = GrowingColumns(source.name)
    lines, begun = layout.line, False
    with ThreadPoolExecutor(THREADS) as pool:
        pending: deque[tuple[Future[_Parsed], float | None, int]] = deque()

        def take() -> None:
            nonlocal lines
            future, share, position = pending.popleft()
            block = future.result()
            if block.problem is not None:
                raise ValueError(f"{source.name}:{lines + block.line}: {block.problem}; the line is {block.shown}")
            growing.add(block.src, block.dst, block.weights, block.largest, share)
            lines += block.lines
            if progress is not None:
                progress(position, source.total)

        for text in blocks_of(source, layout.begin):
            pending.append((pool.submit(_parse, text, layout, strict), source.share, source.position))
            while len(pending) > (THREADS if begun else 0):  # the first block shows how many edges there may be
                take()
                begun = True
        while pending:
            take()
    return growing.columns()


def blocks_of(source: Source, begin: int = 0) -> Iterator[bytes]:
    """Yield the rest of the file from ``begin`` in pieces of whole lines; the last line gets a newline if it lacks one.

    Raises:
        ValueError: a line is longer than a block.
    """
    source.read(begin)
    rest = b""
    if begin == 0 and source.peek(3) == b"\xef\xbb\xbf":
        source.read(3)
    while piece := source.read(BLOCK_NBYTES):
        whole, newline, rest_of_piece = piece.rpartition(b"\n")
        if newline:
            yield rest + whole + newline
            rest = rest_of_piece
        else:
            rest += piece
        if len(rest) > BLOCK_NBYTES:
            raise ValueError(
                f"{source.name} has a line of more than {BLOCK_NBYTES} bytes; an edge is one line of two ids"
            )
    if rest:
        yield rest + b"\n"


def shown(line: bytes) -> str:
    """Return the beginning of a line in the form that errors show."""
    line = line.strip()
    return repr(line[:SHOWN].decode(errors="replace")) + ("..." if len(line) > SHOWN else "")


def _parse(text: bytes, layout: TextLayout, strict: bool) -> _Parsed:
    data = np.frombuffer(text, np.uint8)
    lines = count_lines(data)
    src, dst = np.empty(lines, np.int64), np.empty(lines, np.int64)
    weighted = 0 if layout.weight < 0 else lines
    weights, far_edge, far_begin = np.empty(weighted), np.empty(weighted, np.int64), np.empty(weighted, np.int64)
    delimiter = 0 if layout.delimiter is None else ord(layout.delimiter)
    places = layout.width if strict else 0, layout.src, layout.dst, layout.weight
    found = parse_lines(data, delimiter, *places, src, dst, weights, far_edge, far_begin)
    edges, far, largest, number, begin, line = found
    problem = PROBLEMS[number] if number else None
    if far:
        fields = np.zeros((far, USUAL_WEIGHT), np.uint8)
        copy_fields(data, far_begin[:far], delimiter, fields)
        weights[far_edge[:far]] = fields.view(f"S{USUAL_WEIGHT}").ravel().astype(np.float64)
        for k in np.flatnonzero(fields[:, -1]):  # more than the row could hold
            weights[far_edge[k]] = float(WEIGHT.match(text, far_begin[k])[0])  # type: ignore[index]
        infinite = np.flatnonzero(~np.isfinite(weights[far_edge[:far]]))
        if infinite.size:  # this is before the wrong line, if any, that parse_lines found
            problem = "a weight is beyond 1.8e308, the largest float64; scale them all, this changes no rank"
            begin = text.rfind(b"\n", 0, int(far_begin[infinite[0]])) + 1
            line = 1 + text.count(b"\n", 0, begin)
    return _Parsed(
        *(src[:edges], dst[:edges], weights[:edges] if weighted else None, lines, largest, problem, line),
        shown(text[begin : text.index(b"\n", begin)]) if problem else "",
    )
