"""The experiments: each compares the rows of one run with a model, in a sentence with a verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pdlcheck.bench.experiments.experiment import Experiment, Plot, Point
from pdlcheck.bench.experiments.links import links
from pdlcheck.bench.experiments.pipelines import bubble
from pdlcheck.bench.experiments.rankings import pagerank_versions
from pdlcheck.bench.experiments.rows import Row, Rows
from pdlcheck.bench.experiments.scaling import break_even, processes_and_threads, strong_scaling, weak_scaling
from pdlcheck.bench.experiments.training import data_parallel, gradient_sync, sync_every

__all__ = ["Experiment", "Plot", "Point", "Row", "experiments"]


def experiments(rows: Iterable[Row]) -> list[Experiment]:
    """Return the experiments whose rows are present, in order.

    Args:
        rows: name and facts of each row, in the form that ``pdlcheck bench`` stores.
    """
    found = Rows(rows)
    return [one for make in _EXPERIMENTS for one in make(found)]


_EXPERIMENTS: Sequence[Callable[[Rows], Iterable[Experiment]]] = (
    sync_every,
    strong_scaling,
    weak_scaling,
    processes_and_threads,
    break_even,
    links,
    gradient_sync,
    data_parallel,
    bubble,
    pagerank_versions,
)
