"""Reads edges from a Parquet file. This is the one file that imports pyarrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdlcheck.primitives.pagerank.files.columns import Columns, GrowingColumns, Progress

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise ImportError(
        f"reading .parquet needs pyarrow ({error}); install it with: pip install pdlcheck[parquet]"
    ) from error

__all__ = ["read_parquet"]

ROWS = 1 << 20


def read_parquet(path: Path, progress: Progress | None = None) -> Columns:
    """The edges in columns ``src``, ``dst`` and, where there is one, ``weight``; others are not read.

    Raises:
        ValueError: columns that are missing, not numbers, or hold nulls, negative ids or weights below 0.
        MemoryError: the edges or the nodes do not fit in memory.
    """
    total = path.stat().st_size
    growing, row = GrowingColumns(path), 0
    try:
        with pq.ParquetFile(path) as file:
            names = _columns(path, file.schema_arrow)
            for batch in file.iter_batches(ROWS, columns=names):
                src, dst, *weights = (_numbers(path, name, batch[name], row) for name in names)
                both = np.maximum(src, dst)
                where = int(both.argmax()) if len(both) else 0
                largest = int(both[where]) if len(both) else -1
                row += len(src)
                share = row / file.metadata.num_rows
                at = f"{path}: row {row - len(src) + where}"
                growing.add(src, dst, weights[0] if weights else None, (largest, at), share)
                if progress is not None:
                    progress(int(share * total), total)
    except pa.ArrowException as error:
        raise ValueError(f"{path} cannot be unpacked: {error}; it may be truncated, get it again") from error
    return growing.columns()


def _columns(path: Path, schema: Any) -> list[str]:
    names = [name for name in ("src", "dst", "weight") if name in schema.names]
    if names[:2] != ["src", "dst"]:
        raise ValueError(f"{path} must have columns src and dst, it has {', '.join(schema.names) or 'none'}")
    if "weights" in schema.names and "weight" not in names:
        raise ValueError(f"{path}: weights of edges are read from column weight, it has weights; rename the column")
    for name in names:
        if schema.names.count(name) > 1:
            raise ValueError(f"{path} has {schema.names.count(name)} columns {name}; rename all but one")
        kind = schema.field(name).type
        if not (pa.types.is_integer(kind) or (name == "weight" and pa.types.is_floating(kind))):
            raise ValueError(f"{path}: column {name} must hold numbers, ids whole ones, it holds {kind}; convert it")
    return names


def _numbers(path: Path, name: str, column: Any, row: int) -> NDArray[Any]:
    """A column of a batch whose first row is ``row`` of the file."""
    if column.null_count:
        nulls = np.asarray(column.is_null())
        raise ValueError(f"{path}: column {name} is null at row {row + int(nulls.argmax())}; fill it or drop the row")
    numbers: NDArray[Any] = column.to_numpy()
    if name == "weight":
        return numbers.astype(np.float64)
    outside = (numbers < 0) | (numbers > np.iinfo(np.int64).max)
    if outside.any():
        at = int(outside.argmax())
        raise ValueError(f"{path}: column {name} holds {numbers[at]} at row {row + at}; number the nodes from 0")
    return numbers.astype(np.int64)
