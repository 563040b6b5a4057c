"""Writers of all scores of a ranking to a file: CSV, JSON, npz or Parquet."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import secrets
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from pdlcheck.primitives.pagerank import Graph, PageRankResult
from pdlcheck.primitives.pagerank.node_ids import NodeIds

__all__ = ["WRITERS", "Writer", "node_array", "save_scores", "writer_of"]

ROWS = 1 << 16

Writer = Callable[[IO[bytes], PageRankResult, Graph], None]


def save_scores(output: Path, write: Writer, result: PageRankResult, graph: Graph) -> None:
    """Write the scores to ``output``, completely or not at all.

    They are written to a new file with a random name in the same folder, which then gets the name ``output``. No other
    file is opened, and links are not followed.

    Raises:
        OSError: the folder cannot be written to.
    """
    with _replacing(output) as file:
        write(file, result, graph)


def writer_of(output: Path) -> Writer:
    """Return the writer for files of this suffix.

    Raises:
        ImportError: the suffix is .parquet, and pyarrow is missing.
    """
    if output.suffix == ".parquet":
        from pdlcheck.ranking.parquet_output import write_parquet  # pyarrow is optional

        return write_parquet
    return WRITERS[output.suffix]


def node_array(graph: Graph) -> Any:
    """Return the ids of all nodes: an array of integers, or of objects if nodes have names."""
    if graph.names is None:
        return np.arange(graph.num_nodes)
    return graph.names.array if isinstance(graph.names, NodeIds) else np.array(graph.names, object)


def _write_npz(file: IO[bytes], result: PageRankResult, graph: Graph) -> None:
    ids = node_array(graph)
    if ids.dtype == object:
        ids = ids.astype(str)
    np.savez(file, ids=ids, scores=result.scores, error_bound=result.error_bound, iterations=result.iterations)


def _write_csv(file: IO[bytes], result: PageRankResult, graph: Graph) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("node", "score"))
    for part in _best_first(result, graph):
        rows.writerows(part)
    text.flush()
    text.detach()


def _write_json(file: IO[bytes], result: PageRankResult, graph: Graph) -> None:
    facts = {
        "num_nodes": graph.num_nodes,
        "num_edges": graph.num_edges,
        "iterations": result.iterations,
        "error_bound": result.error_bound,
        "converged": result.converged,
    }
    file.write(json.dumps(facts)[:-1].encode() + b', "scores": [')
    before = "\n"
    for part in _best_first(result, graph):
        rows = (json.dumps({"node": node, "score": score}, ensure_ascii=False) for node, score in part)
        file.write((before + ",\n".join(rows)).encode())
        before = ",\n"
    file.write(b"\n]}\n")


def _best_first(result: PageRankResult, graph: Graph) -> Iterator[list[tuple[Hashable, float]]]:
    """Yield lists of nodes and scores, best first; equal scores are in the order of nodes."""
    order, ids = np.argsort(-result.scores, kind="stable"), node_array(graph)
    for first in range(0, len(order), ROWS):
        part = order[first : first + ROWS]
        yield list(zip(ids[part].tolist(), result.scores[part].tolist(), strict=True))


WRITERS: dict[str, Writer] = {".csv": _write_csv, ".json": _write_json, ".npz": _write_npz}


@contextmanager
def _replacing(output: Path) -> Iterator[IO[bytes]]:
    temporary = output.with_name(f".{output.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, output)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
