"""``pdlcheck pagerank FILE``: reads edges, ranks their nodes, prints the best."""

from __future__ import annotations

import os
import resource
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console

from pdlcheck.primitives.pagerank import PageRankResult, pagerank, read_edges
from pdlcheck.report.ranking import ranking_progress, ranking_table
from pdlcheck.report.tables import line

__all__ = ["rank_file"]


def rank_file(
    path: Path, *, damping: float, tol: float, top: int, output: Path | None, console: Console, errors: Console
) -> bool:
    """Rank the nodes of a file of edges: the ``top`` best on ``console``, progress on ``errors``.

    ``output`` is an ``.npz`` file for all scores; it is there complete, or not at all.

    Returns:
        Whether the error bound is at most ``tol``.

    Raises:
        ValueError, MemoryError, OSError, ImportError: as :func:`read_edges` and :func:`pagerank` say.
    """
    moments = [time.perf_counter()]
    with ranking_progress(errors, tol) as progress:
        graph = read_edges(path, progress=progress.read)
        moments.append(time.perf_counter())
        progress.build()

        def follow(rounds: int, bound: float) -> None:
            if rounds == 0:
                moments.append(time.perf_counter())
            progress.solve(rounds, bound)

        result = pagerank(graph, damping=damping, tol=tol, progress=follow)
        moments.append(time.perf_counter())
    if output is not None:
        _save(output, result)
    read, build, solve = (after - before for before, after in pairwise(moments))
    console.print(ranking_table(result.top(top)))
    line(
        console,
        f"{graph.num_nodes} nodes, {graph.num_edges} edges, {result.iterations} iterations, "
        f"error at most {result.error_bound:.2g}",
    )
    peak = f"peak memory {_peak_nbytes() / 2**30:.2f} GiB"
    line(console, f"seconds: read {read:.2f}, build {build:.2f}, solve {solve:.2f}; {peak}")
    return result.converged


def _save(output: Path, result: PageRankResult) -> None:
    part = output.with_name(output.name + ".part")
    try:
        with part.open("wb") as file:
            np.savez(file, scores=result.scores, error_bound=result.error_bound, iterations=result.iterations)
        os.replace(part, output)
    finally:
        part.unlink(missing_ok=True)


def _peak_nbytes() -> int:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
