"""The section on ``pdlcheck verify``: the table of primitives and worlds, and every failure in full."""

from __future__ import annotations

from pdlcheck.presentation.document import Block, Failure, Grid, Line, Section, Tone, Words
from pdlcheck.report.measured import Cell
from pdlcheck.report.records import Row, Verification, rows, skip_reasons
from pdlcheck.report.tables import count, trial_line, verdict

__all__ = ["verification_section"]


def verification_section(found: Verification, title: str) -> Section:
    """Return the suites, PageRank of the packages, and LeNet on replicas."""
    blocks: list[Block] = [Words(trial_line(trial), "" if trial.works else "doubtful") for trial in found.worlds]
    if found.suites.problem:
        blocks.append(Words(found.suites.problem, "bad"))
    blocks += [Failure(one.nodeid, one.detail, one.replay) for one in found.suites.failures]
    lines = [_line(row) for row in rows(found.suites.records)]
    if lines:
        columns = ["primitive", "world", "properties", "examples tried", "verdict", "seconds"]
        blocks.append(Grid("primitives and worlds", columns, lines))
    skipped = skip_reasons(found.suites.records)
    blocks += [Words(f"{number} skipped: {why}", "doubtful") for why, number in skipped.items()]
    return Section(title, [*blocks, *_packages(found), *_replicas(found)])


def _line(row: Row) -> Line:
    tone: Tone = "bad" if row.failing else "doubtful" if row.skipped == row.properties else "good"
    numbers = [Cell(str(number), number) for number in (row.properties, row.examples)]
    seconds = Cell(f"{row.seconds:.1f}", row.seconds)
    return Line([Cell(row.primitive), Cell(row.world), *numbers, Cell(verdict(row).plain), seconds], tone)


def _packages(found: Verification) -> list[Block]:
    ranking = found.packages
    if ranking is None:
        return []
    top = [
        Line([Cell(str(place), place), Cell(name), Cell(f"{score:.9f}", score)])
        for place, (name, score) in enumerate(ranking.top, 1)
    ]
    agreements = [
        Line(
            [
                Cell(one.graph),
                Cell(str(one.num_nodes), one.num_nodes),
                Cell(str(one.num_edges), one.num_edges),
                Cell(", ".join(one.versions)),
                Cell("FAILS" if one.difference is None else f"{one.difference:.1e}", one.difference),
            ],
            "bad" if one.failure else "",
        )
        for one in ranking.agreements
    ]
    return [
        Grid("PageRank of the packages of Debian 12", ["place", "package", "score"], top),
        Words(f"{ranking.iterations} rounds, L1 error at most {ranking.error_bound:.1e}."),
        Grid("versions of PageRank", ["graph", "nodes", "edges", "versions", "largest difference"], agreements),
        *(Words(one.failure, "bad") for one in ranking.agreements if one.failure),
        *(Words(f"left out: {why}", "doubtful") for why in ranking.missing),
    ]


def _replicas(found: Verification) -> list[Block]:
    training = found.replicas
    if training is None:
        return [Words(f"LeNet on replicas: left out: {found.left_out}", "doubtful")] if found.left_out else []
    lines = [
        Line(
            [
                Cell(count(run.replicas, "replica"), run.replicas),
                Cell(f"{run.loss:.4f}", run.loss),
                Cell(f"{run.accuracy:.1%}", run.accuracy),
                Cell(f"{run.difference:.1e}", run.difference),
                Cell("bit for bit" if run.bitwise_equal else "DIFFER"),
                Cell(f"{run.seconds:.1f}", run.seconds),
            ],
            "good" if run.bitwise_equal and run.difference <= training.allowed else "bad",
        )
        for run in training.runs
    ]
    columns = ["replicas", "loss", "accuracy", "largest difference of a weight", "replicas equal", "seconds"]
    return [Grid("LeNet, synchronous SGD", columns, lines), Words(training.setting)]
