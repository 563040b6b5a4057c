"""Rows and verdicts from the rounds; every figure is a median over rounds with its spread beside it."""

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
        digits = 0 if self.median >= 100 else 2
        return f"{self.median:.{digits}f} ({min(self.ms):.{digits}f}-{max(self.ms):.{digits}f})"


@dataclass
class Row:
    """One harness at one world_size; every list has one value a round.

    Args:
        tests: n, of the smaller session; the larger one has twice as many.
        small_ms, large_ms: collection and tests of either session.
        between_ms: time from the start of one test to that of the next, median of the larger session.
        start_up_ms: the rest of the smaller session's command.
        cpu_ms: CPU time of all processes for one more test; for MPI without the launcher's own.
    """

    tests: int
    small_ms: list[float] = field(default_factory=list)
    large_ms: list[float] = field(default_factory=list)
    between_ms: list[float] = field(default_factory=list)
    start_up_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    @property
    def per_test_ms(self) -> float:
        """Return the difference of the fastest sessions of either size, because other programs can only add time."""
        return (min(self.large_ms) - min(self.small_ms)) / self.tests

    @property
    def median_ms(self) -> float:
        """Return the difference of the median sessions."""
        return (median(self.large_ms) - median(self.small_ms)) / self.tests


def print_table(rows: Mapping[tuple[str, int], Row], world_sizes: Sequence[int]) -> None:
    """Print one line for each harness and world_size; the ratio is that of the first column to our pool's."""
    head = (
        f"{'harness':24} {'ranks':>5} {'ms per test':>12} {'of medians':>11} {'ratio':>7} "
        f"{'test to test, ms':>22} {'CPU ms':>8} {'start-up, ms':>20}"
    )
    print(head + "\n" + "-" * len(head))
    for world_size in world_sizes:
        ours = rows.get((OURS, world_size))
        for (name, size), row in rows.items():
            if size != world_size:
                continue
            ratio = f"{row.per_test_ms / ours.per_test_ms:.2f}" if ours else ""
            between = str(Figure(row.between_ms)) if row.between_ms else "-"
            print(
                f"{name:24} {size:>5} {row.per_test_ms:>12.2f} {row.median_ms:>11.2f} {ratio:>7} "
                f"{between:>22} {median(row.cpu_ms):>8.2f} {Figure(row.start_up_ms)!s:>20}"
            )
        print()


def verdicts(rows: Mapping[tuple[str, int], Row], extra: Mapping[str, Figure]) -> list[tuple[str, str, bool | None]]:
    """Return promise, measured value and whether it holds for each target; None if this run has not measured it."""
    ours, continuous = rows.get((OURS, 2)), rows.get((CONTINUOUS, 2))
    fresh, spawn = rows.get((FRESH, 2)), rows.get((SPAWN, 2))
    found: list[tuple[str, str, bool | None]] = []

    def judge(promise: str, measured: str | None, held: bool) -> None:
        found.append((promise, measured or "not measured", held if measured else None))

    one = ours.per_test_ms if ours else 0.0
    judge("a trivial test on 2 ranks: <= 2.5 ms", f"{one:.2f} ms" if one else None, one <= 2.5)
    other = continuous.per_test_ms if continuous else 0.0
    words = f"{one / other:.2f} times its {other:.2f} ms" if one > 0 and other > 0 else None  # less would be noise
    judge(f"no slower than {CONTINUOUS}", words, one <= other)
    start = extra.get("pool_start_2")
    judge("start-up of a pool of 2: < 100 ms", str(start) if start else None, bool(start and start.median < 100))
    ratio = spawn.per_test_ms / fresh.per_test_ms if fresh and spawn else 0.0
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
    policed = extra.get("bare_suite_2_taking_turns")
    if pool and policed:
        words = f"{(pool.median / policed.median - 1) * 100:.1f} % (over {policed} ms)"
        found.append(("the same, over a loop with the ranks' scheduling", words, None))
    return found
