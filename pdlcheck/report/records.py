"""What `pdlcheck verify` and `pdlcheck doctor` found, as data."""

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
    """Whether ``ranks`` ranks ran in the world ``name`` here; if not, why, and the command that helps, if any."""

    name: str
    works: bool
    seconds: float
    why: str = ""
    cure: str = ""
    ranks: int = 2


@dataclass(frozen=True)
class PropertyRecord:
    """One test of the suites, in one world.

    ``world`` is ``-`` for a test that needs none. ``examples`` counts what was really executed. ``detail`` is
    the reason of a skip or the whole report of a failure; ``replay`` the command that runs this test again.
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
        return self.primitive, self.world


@dataclass(frozen=True)
class SuiteRun:
    """All tests of one run; ``problem`` says why the run itself did not come to its end, if so."""

    records: Sequence[PropertyRecord]
    seconds: float
    problem: str = ""

    @property
    def failures(self) -> list[PropertyRecord]:
        return [record for record in self.records if record.outcome == "fails"]

    @property
    def held(self) -> bool:
        """Something was tried, all of it held, and the run came to its end."""
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
    """Versions of PageRank compared on one graph; ``difference`` is the largest L1 distance of two of them.

    ``failure`` is what the check said, if it rejected them; ``difference`` is then not known.
    """

    graph: str
    num_nodes: int
    num_edges: int
    versions: Sequence[str]
    difference: float | None
    failure: str = ""


@dataclass(frozen=True)
class PackageRanking:
    """The best packages with their scores, and how far the versions of PageRank are apart."""

    top: Sequence[tuple[str, float]]
    iterations: int
    error_bound: float
    agreements: Sequence[Agreement]
    missing: Sequence[str]
    seconds: float

    @property
    def held(self) -> bool:
        return not any(agreement.failure for agreement in self.agreements)


@dataclass(frozen=True)
class ReplicaRun:
    """One network trained on ``replicas`` replicas.

    ``loss`` is the mean over the last epoch, ``accuracy`` the share of test images that it gets right,
    ``difference`` the largest of a weight from the run on one replica.
    """

    replicas: int
    loss: float
    accuracy: float
    difference: float
    bitwise_equal: bool
    seconds: float


@dataclass(frozen=True)
class ReplicaTraining:
    """The same training on several numbers of replicas; round-off may move a weight by ``allowed``."""

    setting: str
    runs: Sequence[ReplicaRun]
    allowed: float

    @property
    def held(self) -> bool:
        return all(run.bitwise_equal and run.difference <= self.allowed for run in self.runs)


@dataclass(frozen=True)
class Verification:
    """All that ``pdlcheck verify`` found; what was not run is None. ``held``: all of it, on all worlds asked for.

    ``left_out`` says why LeNet was not trained, if so.
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
    """Something that a machine has or lacks; ``cure`` is how to get it, empty where it is there.

    ``required``: without it pdlcheck does not work; the rest is optional.
    """

    name: str
    found: str
    cure: str = ""
    required: bool = False

    @property
    def is_missing(self) -> bool:
        """True if the machine lacks it, or it does not work."""
        return bool(self.cure)


def rows(records: Iterable[PropertyRecord]) -> list[Row]:
    """One row for each primitive and world; primitives in the order of their first test."""
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
    """How many tests were skipped for each reason."""
    counts: dict[str, int] = {}
    for record in records:
        if record.outcome == "skipped":
            counts[record.detail] = counts.get(record.detail, 0) + 1
    return counts
