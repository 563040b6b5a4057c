"""The work of ``pdlcheck pagerank FILE``: read edges, rank their nodes, print the best."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from pdlcheck.primitives.pagerank import pagerank
from pdlcheck.primitives.pagerank.files import EdgeFile
from pdlcheck.primitives.pagerank.files.columns import Progress
from pdlcheck.ranking.output import save_scores, writer_of
from pdlcheck.report.ranking import ranking_progress, ranking_table
from pdlcheck.report.tables import line

__all__ = ["rank_file"]


def rank_file(
    read: Callable[[Progress], EdgeFile],
    *,
    damping: float,
    tol: float,
    top: int,
    output: Path | None,
    console: Console,
    errors: Console,
) -> bool:
    """Rank the nodes of a file of edges: print the ``top`` best on ``console``, progress and notes on ``errors``.

    ``read`` reads the file and calls its argument now and then. ``output`` is a file for all scores; its suffix selects
    the format. It is written completely, or not at all.

    Returns:
        True if the error bound is at most ``tol``, else False.

    Raises:
        ValueError, MemoryError, OSError, ImportError: as in :func:`read_edges` and :func:`pagerank`.
    """
    write = None if output is None else writer_of(output)
    moments = [time.perf_counter()]
    with ranking_progress(errors, tol) as progress:
        edges = read(progress.read)
        graph = edges.graph
        moments.append(time.perf_counter())
        progress.build()

        def follow(rounds: int, bound: float) -> None:
            if rounds == 0:
                moments.append(time.perf_counter())
            progress.solve(rounds, bound)

        result = pagerank(graph, damping=damping, tol=tol, progress=follow)
        moments.append(time.perf_counter())
    line(errors, edges.description)
    for note in edges.notes:
        line(errors, f"note: {note}")
    if output is not None and write is not None:
        save_scores(output, write, result, graph)
    seconds = [after - before for before, after in pairwise(moments)]
    console.print(ranking_table(result.top(top)))
    line(
        console,
        f"{graph.num_nodes} nodes, {graph.num_edges} edges, {result.iterations} iterations, "
        f"error at most {result.error_bound:.2g}",
    )
    peak = f"peak memory {_peak_nbytes() / 2**30:.2f} GiB"
    line(console, f"seconds: read {seconds[0]:.2f}, build {seconds[1]:.2f}, solve {seconds[2]:.2f}; {peak}")
    return result.converged


def _peak_nbytes() -> int:
    """Return the largest number of bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
