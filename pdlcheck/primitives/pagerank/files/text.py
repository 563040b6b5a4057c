"""Reads edges from lines of text, block by block on two threads, into arrays that grow in place."""

from __future__ import annotations

import gzip
import re
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from pdlcheck.primitives.pagerank.files.columns import Columns, GrowingColumns, Progress
from pdlcheck.primitives.pagerank.files.lines import PROBLEMS, copy_fields, count_lines, parse_lines

__all__ = ["read_text"]

BLOCK_NBYTES = 4 << 20
THREADS = 2
SHOWN = 60  # characters of a wrong line
USUAL_WEIGHT = 32  # characters, at most
PACKED = {  # what a file that is no text begins with: what it is, and what makes it one that can be read
    b"\x1f\x8b": ("gzipped", "give it a name that ends in .gz"),
    b"BZh": ("packed by bzip2", "unpack it with bunzip2"),
    b"\xfd7zXZ\x00": ("packed by xz", "unpack it with unxz"),
    b"\x28\xb5\x2f\xfd": ("packed by zstd", "unpack it with unzstd"),
    b"PK\x03\x04": ("a zip archive", "unpack it with unzip, or give arrays of numpy a name that ends in .npz"),
    b"PAR1": ("Parquet", "give it a name that ends in .parquet"),
    b"\xff\xfe": ("text in UTF-16", "convert it to UTF-8 with iconv"),
    b"\xfe\xff": ("text in UTF-16", "convert it to UTF-8 with iconv"),
}
FIELD = re.compile(rb"[^\s,]+")


@dataclass(frozen=True, eq=False)
class _Parsed:
    """One block: its edges, and where in it something stands."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    weights: NDArray[np.float64] | None
    columns: int
    lines: int
    largest: int
    largest_line: int
    problem: str | None
    line: int
    shown: str


def read_text(path: Path, progress: Progress | None = None) -> Columns:
    """The edges of a text file, gzipped where its name ends in ``.gz``; ``num_nodes`` is the largest id + 1.

    Beside the columns it holds a few blocks of 4 MB.

    Raises:
        ValueError: a line that is no edge, with the file, the number of the line and the cure; a torn gzip stream.
        MemoryError: the edges, as many as the file's length lets expect, or the nodes do not fit in memory.
    """
    growing = GrowingColumns(path)
    lines = columns = 0
    with path.open("rb") as raw, ThreadPoolExecutor(THREADS) as pool:
        total = path.stat().st_size
        pending: deque[tuple[Future[_Parsed], int]] = deque()

        def take() -> None:
            nonlocal lines, columns
            future, position = pending.popleft()
            block = future.result()
            if block.problem is not None:
                raise ValueError(f"{path}:{lines + block.line}: {block.problem}; the line is {block.shown}")
            largest_at = f"{path}:{lines + block.largest_line}"
            growing.add(block.src, block.dst, block.weights, (block.largest, largest_at), position / max(total, 1))
            lines, columns = lines + block.lines, block.columns
            if progress is not None:
                progress(position, total)

        for text in _blocks(path, raw):
            pending.append((pool.submit(_parse, text, columns), raw.tell()))
            while len(pending) > (THREADS if columns else 0):  # the first edge says how many columns there are
                take()
        while pending:
            take()
    return growing.columns()


def _blocks(path: Path, raw: IO[bytes]) -> Iterator[bytes]:
    """The file in pieces of whole lines, the last one with a newline added where it lacks one."""
    stream: IO[bytes] = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw  # type: ignore[assignment]
    rest, first = b"", True
    while True:
        try:
            piece = stream.read(BLOCK_NBYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} cannot be unpacked: {error}; it may be truncated, get it again") from error
        if first:
            first, piece = False, piece.removeprefix(b"\xef\xbb\xbf")
            for begin, (what, cure) in PACKED.items():
                if stream is raw and piece.startswith(begin):
                    raise ValueError(f"{path} is {what}, the suffix of its name stands for text; {cure}")
            if piece.startswith(b"%%MatrixMarket"):
                raise ValueError(f"{path}:1: a Matrix Market file has a line of sizes; read it with scipy.io.mmread")
        if not piece:
            break
        whole, newline, rest_of_piece = piece.rpartition(b"\n")
        if newline:
            yield rest + whole + newline
            rest = rest_of_piece
        else:
            rest += piece
        if len(rest) > BLOCK_NBYTES:
            raise ValueError(f"{path} has a line of more than {BLOCK_NBYTES} bytes; an edge is one line of two ids")
    if rest:
        yield rest + b"\n"


def _parse(text: bytes, columns: int) -> _Parsed:
    data = np.frombuffer(text, np.uint8)
    lines = count_lines(data)
    src, dst = np.empty(lines, np.int64), np.empty(lines, np.int64)
    weighted = 0 if columns == 2 else lines
    weights, far_edge, far_begin = np.empty(weighted), np.empty(weighted, np.int64), np.empty(weighted, np.int64)
    found = parse_lines(data, columns, src, dst, weights, far_edge, far_begin)
    edges, columns, far, largest, largest_line, number, begin, line = found
    problem = PROBLEMS[number] if number else None
    if far:
        fields = np.zeros((far, USUAL_WEIGHT), np.uint8)
        copy_fields(data, far_begin[:far], fields)
        weights[far_edge[:far]] = fields.view(f"S{USUAL_WEIGHT}").ravel().astype(np.float64)
        for k in np.flatnonzero(fields[:, -1]):  # more than the row could hold
            weights[far_edge[k]] = float(FIELD.match(text, far_begin[k])[0])  # type: ignore[index]
        infinite = np.flatnonzero(~np.isfinite(weights[far_edge[:far]]))
        if infinite.size:  # before the wrong line, if any, that parse_lines found
            problem = "a weight is beyond 1.8e308, the largest float64; scale them all, this changes no rank"
            begin = text.rfind(b"\n", 0, int(far_begin[infinite[0]])) + 1
            line = 1 + text.count(b"\n", 0, begin)
    shown = text[begin : text.index(b"\n", begin)].strip() if problem else b""
    return _Parsed(
        *(src[:edges], dst[:edges], weights[:edges] if columns == 3 else None, columns, lines),
        *(largest, largest_line, problem, line),
        repr(shown[:SHOWN].decode(errors="replace")) + ("..." if len(shown) > SHOWN else ""),
    )
