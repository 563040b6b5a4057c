"""The results of `pdlcheck verify` and `pdlcheck doctor`, as data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Agreement",
    "PackageRanking",
    "Part",
    "PropertyRecord",
    "ReplicaRun",
    "ReplicaTraining",
    "Row",
    "SuiteRun",
    "Verification",
    "WorldTrial",
    "rows",
    "skip_reasons",
]

Key = tuple[str, str]  # primitive and world


@dataclass(frozen=True)
class WorldTrial:
    """The result of a trial run of ``ranks`` ranks in the world ``name`` on this machine.

    If they did not run, ``why`` holds the reason, and ``cure`` the command that helps, if there is one.
    """

    name: str
    works: bool
    seconds: float
    why: str = ""
    cure: str = ""
    ranks: int = 2


@dataclass(frozen=True)
class PropertyRecord:
    """One test of the suites, in one world.

    ``world`` is ``-`` for a test that needs none. ``examples`` counts the executed examples. ``detail`` is the reason
    of a skip or the full report of a failure; ``replay`` is the command that runs this test again.
    """

    nodeid: str
    primitive: str
    world: str
    outcome: Literal["holds", "fails", "skipped"]
    examples: int
    seconds: float
    detail: str = ""
    replay: str = ""

    @property
    def key(self) -> Key:
        """Return the primitive and the world."""
        return self.primitive, self.world


@dataclass(frozen=True)
class SuiteRun:
    """All tests of one run; ``problem`` holds the reason if the run itself did not finish."""

    records: Sequence[PropertyRecord]
    seconds: float
    problem: str = ""

    @property
    def failures(self) -> list[PropertyRecord]:
        """Return the records of the tests that fail."""
        return [record for record in self.records if record.outcome == "fails"]

    @property
    def held(self) -> bool:
        """Return whether at least one property was tried, all held, and the run finished."""
        return not self.problem and not self.failures and any(r.outcome == "holds" for r in self.records)


@dataclass(frozen=True)
class Row:
    """The tests of one primitive in one world."""

    primitive: str
    world: str
    properties: int
    failing: int
    skipped: int
    examples: int
    seconds: float


@dataclass(frozen=True)
class Agreement:
    """Versions of PageRank compared on one graph; ``difference`` is the largest L1 distance between two of them.

    ``failure`` is the message of the check if it rejected them; then ``difference`` is unknown.
    """

    graph: str
    num_nodes: int
    num_edges: int
    versions: Sequence[str]
    difference: float | None
    failure: str = ""


@dataclass(frozen=True)
class PackageRanking:
    """The best packages with their scores, and the differences between the versions of PageRank."""

    top: Sequence[tuple[str, float]]
    iterations: int
    error_bound: float
    agreements: Sequence[Agreement]
    missing: Sequence[str]
    seconds: float

    @property
    def held(self) -> bool:
        """Return whether all versions agree."""
        return not any(agreement.failure for agreement in self.agreements)


@dataclass(frozen=True)
class ReplicaRun:
    """One network trained on ``replicas`` replicas.

    ``loss`` is the mean over the last epoch. ``accuracy`` is the share of test images that it classifies correctly.
    ``difference`` is the largest difference of a weight from the run on one replica.
    """

    replicas: int
    loss: float
    accuracy: float
    difference: float
    bitwise_equal: bool
    seconds: float


@dataclass(frozen=True)
class ReplicaTraining:
    """The same training on several numbers of replicas; round-off may change a weight by ``allowed``."""

    setting: str
    runs: Sequence[ReplicaRun]
    allowed: float

    @property
    def held(self) -> bool:
        """Return whether the replicas are equal and the weights differ by at most ``allowed``, in all runs."""
        return all(run.bitwise_equal and run.difference <= self.allowed for run in self.runs)


@dataclass(frozen=True)
class Verification:
    """All results of ``pdlcheck verify``; a part that was not run is None.

    ``held``: all parts held, on all requested worlds. ``left_out`` is the reason if LeNet was not trained.
    """

    worlds: Sequence[WorldTrial]
    suites: SuiteRun
    packages: PackageRanking | None
    replicas: ReplicaTraining | None
    held: bool
    seconds: float
    left_out: str = ""


@dataclass(frozen=True)
class Part:
    """A part that a machine has or lacks; ``cure`` describes how to get it, and is empty if it is present.

    ``required``: pdlcheck does not work without it; other parts are optional.
    """

    name: str
    found: str
    cure: str = ""
    required: bool = False

    @property
    def is_missing(self) -> bool:
        """Return True if the machine lacks the part, or it does not work."""
        return bool(self.cure)


def rows(records: Iterable[PropertyRecord]) -> list[Row]:
    """Return one row for each primitive and world; primitives are in the order of their first test."""
    groups: dict[str, dict[str, list[PropertyRecord]]] = {}
    for record in records:
        groups.setdefault(record.primitive, {}).setdefault(record.world, []).append(record)
    return [_row(primitive, world, group) for primitive, worlds in groups.items() for world, group in worlds.items()]


def _row(primitive: str, world: str, group: Sequence[PropertyRecord]) -> Row:
    return Row(
        primitive,
        world,
        properties=len(group),
        failing=sum(record.outcome == "fails" for record in group),
        skipped=sum(record.outcome == "skipped" for record in group),
        examples=sum(record.examples for record in group),
        seconds=sum(record.seconds for record in group),
    )


def skip_reasons(records: Iterable[PropertyRecord]) -> dict[str, int]:
    """Return the number of skipped tests for each reason."""
    counts: dict[str, int] = {}
    for record in records:
        if record.outcome == "skipped":
            counts[record.detail] = counts.get(record.detail, 0) + 1
    return counts
