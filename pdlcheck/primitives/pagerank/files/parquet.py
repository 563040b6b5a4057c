"""The reader of edges from a Parquet file. This is the one file that imports pyarrow to read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdlcheck.extras import extra
from pdlcheck.primitives.pagerank.files.column_names import (
    IS_DESTINATION,
    IS_SOURCE,
    IS_WEIGHT,
    NEVER_A_WEIGHT,
    Choice,
    place_of,
    weight_column,
)
from pdlcheck.primitives.pagerank.files.columns import Columns, GrowingColumns, Progress
from pdlcheck.primitives.pagerank.files.source import Source

with extra("parquet", "reading .parquet"):
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = ["read_parquet"]

ROWS = 1 << 20


def read_parquet(source: Source, choice: Choice, progress: Progress | None = None) -> tuple[Columns, str]:
    """Return the edges and a description.

    The file has two columns of ids, whole numbers or text, and perhaps one of weights.

    Raises:
        ValueError: there are no such columns, a value is null, an id is negative, or a third column may be a weight or
            not.
        MemoryError: the edges do not fit in memory.
    """
    growing, row = GrowingColumns(source.name), 0
    numbers: dict[str, int] = {}
    try:
        with source.seekable() as seekable, pq.ParquetFile(seekable) as file:
            schema = file.schema_arrow
            src, dst, weight = _places(source.name, schema, choice)
            wanted = [schema.names[place] for place in (src, dst, weight) if place >= 0]
            texts = [_is_text(schema.field(place).type) for place in (src, dst)]
            named = choice.names or any(texts)
            for batch in file.iter_batches(ROWS, columns=wanted):
                share = (row + batch.num_rows) / file.metadata.num_rows
                columns = [batch.column(batch.schema.get_field_index(name)) for name in wanted]
                for name, column in zip(wanted, columns, strict=True):
                    _require_values(source.name, name, column, row)
                if named:
                    ends = [_numbered(column, numbers) for column in columns[:2]]
                    largest = len(numbers) - 1
                else:
                    ends = [_ids(source.name, name, column, row) for name, column in zip(wanted, columns[:2])]  # noqa: B905
                    largest = max(-1, *(int(ids.max()) if len(ids) else -1 for ids in ends))
                weights = columns[2].to_numpy(zero_copy_only=False).astype(np.float64) if weight >= 0 else None
                growing.add(ends[0], ends[1], weights, largest, share)
                row += batch.num_rows
                if progress is not None and source.total is not None:
                    progress(int(share * source.total), source.total)
            if row != file.metadata.num_rows:
                raise ValueError(
                    f"{source.name} says that it has {file.metadata.num_rows} rows, and has {row}; it is damaged, get "
                    "the file again"
                )
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # an error of the system, not of the content
            raise
        raise source.unreadable(error) from error
    kept = f"weights from {schema.names[weight]!r}" if weight >= 0 else "no weights"
    unread = [repr(name) for place, name in enumerate(schema.names) if place not in (src, dst, weight)]
    left_out = f"; not read: {', '.join(unread)}" if unread else ""
    ends_said = f"edges from {schema.names[src]!r} to {schema.names[dst]!r}"
    said = f"Parquet, {ends_said}, ids are {'names' if named else 'integers'}, {kept}{left_out}"
    return growing.columns(tuple(numbers) if named else None), said


def _places(file: str, schema: Any, choice: Choice) -> tuple[int, int, int]:
    """Return the columns of both ends and of the weight, which is -1 if there is none."""
    names = schema.names
    there = ", ".join(names) or "none"
    if choice.columns is not None:
        src, dst, *rest = choice.places(file, names, len(names))
        weight = rest[0] if rest else -1
    else:
        for name in names:
            if names.count(name) > 1 and (IS_SOURCE(name) or IS_DESTINATION(name) or IS_WEIGHT(name)):
                raise ValueError(f"{file} has {names.count(name)} columns {name}; rename all but one")
        known = place_of(IS_SOURCE, names), place_of(IS_DESTINATION, names)
        ends = [place for place, name in enumerate(names) if not IS_WEIGHT(name) and not NEVER_A_WEIGHT(name)]
        if known[0] is not None and known[1] is not None:
            src, dst = known[0], known[1]
        elif len(ends) == 2:
            src, dst = ends
        else:
            raise ValueError(
                f"{file} must have columns src and dst, it has {there}; choose them with --columns SRC,DST or "
                "--columns SRC,DST,WEIGHT (columns=...)"
            )
        others = [place for place in range(len(names)) if place not in (src, dst)]
        numeric = [place for place in others if _is_number(schema.field(place).type)]
        weight = weight_column(file, names, others, numeric, choice.weights)
    for place in (src, dst, weight):
        if place < 0:
            continue
        name, kind = names[place], schema.field(place).type
        if names.count(name) > 1:
            raise ValueError(f"{file} has {names.count(name)} columns {name}; rename all but one")
        if place == weight and not _is_number(kind):
            raise ValueError(f"{file}: column {name} must hold numbers, it holds {kind}; convert it")
        if place != weight and not (pa.types.is_integer(kind) or _is_text(kind)):
            raise ValueError(f"{file}: column {name} must hold whole numbers or text, it holds {kind}; convert it")
    if _is_text(schema.field(src).type) != _is_text(schema.field(dst).type) and not choice.names:
        raise ValueError(
            f"{file}: column {names[src]} holds {schema.field(src).type}, {names[dst]} holds {schema.field(dst).type}; "
            "pass --names (names=True) to compare both as text"
        )
    return src, dst, weight


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _require_values(file: str, name: str, column: Any, row: int) -> None:
    """Raise ValueError if a column of a batch has a null; the batch begins at row ``row`` of the file."""
    if column.null_count:
        nulls = np.asarray(column.is_null())
        raise ValueError(f"{file}: column {name} is null at row {row + int(nulls.argmax())}; fill it or drop the row")


def _numbered(column: Any, numbers: dict[str, int]) -> NDArray[np.int64]:
    """Return the number of each name; new names get the next numbers."""
    if not pa.types.is_dictionary(column.type):
        column = column.cast(pa.string()).dictionary_encode()
    names = column.dictionary.cast(pa.string()).to_pylist()
    used = np.unique(column.indices.to_numpy(zero_copy_only=False))
    places = np.zeros(len(names), np.int64)
    for k in used.tolist():
        places[k] = numbers.setdefault(names[k], len(numbers))
    found: NDArray[np.int64] = places[column.indices.to_numpy(zero_copy_only=False)]
    return found


def _ids(file: str, name: str, column: Any, row: int) -> NDArray[np.int64]:
    ids: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    outside = (ids < 0) | (ids > np.iinfo(np.int64).max)
    if outside.any():
        at = int(outside.argmax())
        raise ValueError(
            f"{file}: column {name} holds {ids[at]} at row {row + at}, ids are from 0 to 2**63 - 1; where ids are "
            "names, pass --names (names=True)"
        )
    return ids.astype(np.int64)
