"""The experiment on the versions of PageRank: the time of a round of each version on one graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from pdlcheck.bench.experiments.experiment import Experiment, Plot, Point
from pdlcheck.bench.experiments.rows import Rows, as_ms

__all__ = ["pagerank_versions"]

_ROUNDS = 200  # the rounds of a row


def pagerank_versions(rows: Rows) -> Iterable[Experiment]:
    """Yield an experiment for each graph: its versions by precision, the fastest, and the ratio of the slowest."""
    test = "test_version"
    by_graph: dict[str, dict[str, tuple[str, float]]] = defaultdict(dict)
    for (_, rest), ways in rows.of(test).items():
        graph, _, version = rest.partition("-")
        if "" in ways and version:
            by_graph[graph][version] = (rest, ways[""])
    for graph, versions in by_graph.items():
        if len(versions) < 2:
            continue
        points: dict[str, list[Point]] = defaultdict(list)
        for version, (rest, _) in versions.items():
            name, _, dtype = version.rpartition("-")
            points[dtype].append(rows.point(name, test, 1, rest, scale=1e6 / _ROUNDS))
        seconds = {version: value for version, (_, value) in versions.items()}
        fastest, slowest = min(seconds, key=seconds.__getitem__), max(seconds, key=seconds.__getitem__)
        device = rows.facts(test, 1, versions[fastest][0]).get("device", "cpu")
        each = ", ".join(f"{version} {as_ms(value / _ROUNDS)}" for version, value in seconds.items())
        yield Experiment(
            f"versions of PageRank on {device}, graph {graph}",
            f"A round takes: {each}. {fastest} is the fastest, {slowest} takes "
            f"{seconds[slowest] / seconds[fastest]:.1f} times as long. On another device, compare with "
            "`pdlcheck bench pagerank --device cuda`.",
            plot=Plot("version", "microseconds of a round", dict(points)),
        )
