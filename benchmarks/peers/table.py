"""Rows and verdicts from the rounds; every figure is a median over rounds, its spread beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from peers.sides import CONTINUOUS, FRESH, OURS, SPAWN

__all__ = ["Figure", "Row", "print_table", "verdicts"]


@dataclass(frozen=True)
class Figure:
    """Milliseconds, one value a round."""

    ms: Sequence[float]

    @property
    def median(self) -> float:
        return median(self.ms)

    def __str__(self) -> str:
        return f"{self.median:.4g} ({min(self.ms):.4g}-{max(self.ms):.4g})"


@dataclass
class Row:
    """One harness at one world_size.

    Args:
        per_test: the difference of two sessions, of n and 2n tests, over n; collection is part of it.
        between: from the begin of one test to that of the next, in the larger session.
        start_up: the whole command of the smaller session less its tests.
        cpu: CPU time of all processes for one more test; for MPI without the launcher's own.
    """

    per_test: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    start_up: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def print_table(rows: Mapping[tuple[str, int], Row], world_sizes: Sequence[int]) -> None:
    """One line for each harness; ratios are of medians, ours is 1."""
    for world_size in world_sizes:
        print(f"\n{world_size} ranks, ms: median (lowest-highest round)")
        head = f"{'harness':26} {'per test':>24} {'ratio':>7} {'test to test':>22} {'CPU a test':>12} {'start-up':>24}"
        print(head + "\n" + "-" * len(head))
        ours = rows.get((OURS, world_size))
        for (name, size), row in rows.items():
            if size != world_size:
                continue
            per_test = Figure(row.per_test)
            ratio = f"{per_test.median / Figure(ours.per_test).median:.2f}" if ours else ""
            between = str(Figure(row.between)) if row.between else "one by one"
            print(
                f"{name:26} {per_test!s:>24} {ratio:>7} {between:>22} "
                f"{Figure(row.cpu).median:>12.3g} {Figure(row.start_up)!s:>24}"
            )


def verdicts(rows: Mapping[tuple[str, int], Row], extra: Mapping[str, Figure]) -> list[tuple[str, str, bool | None]]:
    """(what is promised, what was measured, held); None where this run has not measured it."""
    ours, continuous = rows.get((OURS, 2)), rows.get((CONTINUOUS, 2))
    fresh, spawn = rows.get((FRESH, 2)), rows.get((SPAWN, 2))
    found: list[tuple[str, str, bool | None]] = []

    def judge(promise: str, measured: str | None, held: bool) -> None:
        found.append((promise, measured or "not measured", held if measured else None))

    one = Figure(ours.per_test) if ours else None
    judge("a trivial test on 2 ranks: <= 2.5 ms", str(one) if one else None, bool(one and one.median <= 2.5))
    other = Figure(continuous.per_test) if continuous else None
    words = f"{one.median / other.median:.2f} times its time" if one and other else None
    judge(f"no slower than {CONTINUOUS}", words, bool(one and other and one.median <= other.median))
    start = extra.get("pool_start_2")
    judge("start-up of a pool of 2: < 100 ms", str(start) if start else None, bool(start and start.median < 100))
    ratio = Figure(spawn.per_test).median / Figure(fresh.per_test).median if fresh and spawn else 0.0
    judge("fresh: >= 20 x cheaper than mp.spawn", f"{ratio:.1f} x" if ratio else None, ratio >= 20)
    example = extra.get("example_2")
    judge(
        "Hypothesis on 2 ranks: <= 4 ms an example",
        str(example) if example else None,
        bool(example and example.median <= 4),
    )
    pool, bare = extra.get("pool_suite_2"), extra.get("bare_suite_2")
    share = (pool.median / bare.median - 1) * 100 if pool and bare else 0.0
    words = f"{share:.1f} % ({pool} over {bare} ms)" if pool and bare else None
    judge("200 real tests on 2 ranks: pool adds <= 20 %", words, share <= 20)
    return found
