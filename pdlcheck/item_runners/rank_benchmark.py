"""The fixture ``rank_benchmark``: a rank times the function itself, the controller lets the ranks time it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from pdlcheck.bench.formulas import BUSBW_FACTORS
from pdlcheck.bench.measurement import Subject, combine
from pdlcheck.bench.timing import Rounds
from pdlcheck.compat.pytest_benchmark import is_used, least_rounds, longest_s, use
from pdlcheck.harness.collection.cases import case_of, runs_in_a_rank
from pdlcheck.harness.rank_context import rank_context
from pdlcheck.harness.reporting.benchmark_session import NOTE, add_rows, note_untimed
from pdlcheck.harness.running.worlds import open_world
from pdlcheck.item_runners.processes.rank.rank_benchmark import call_once, named, time_on_rank
from pdlcheck.worlds.journal import note
from pdlcheck.worlds.processes.rank.own_device import own_device

__all__ = ["RankBenchmark"]


class RankBenchmark:
    """The value of the fixture; see ``pdlcheck.plugin.rank_benchmark``.

    Args:
        item: the test.
        benchmark: the fixture of pytest-benchmark, whose options and markers apply.
        world: name of the world, for a test that has no ranks of its own.
    """

    def __init__(self, item: pytest.Item, benchmark: Any, world: str | None) -> None:
        self._item = item
        self._benchmark = benchmark
        self._world = world

    def __call__(
        self,
        fn: Callable[..., Any],
        *args: Any,
        nbytes: int | None = None,
        operation: str | None = None,
        against: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
        check: Callable[[Any], int | None] | None = None,
        setup: Callable[[], object] | None = None,
        iterations: int | None = None,
        world_size: int | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> Any:
        """Time ``fn(*args)``; see ``pdlcheck.plugin.rank_benchmark``."""
        __tracebackhide__ = True
        ways, rounds = named(fn, against), self._rounds(iterations, setup)
        if operation is not None and (operation not in BUSBW_FACTORS or nbytes is None):
            known = ", ".join(BUSBW_FACTORS)
            raise ValueError(f"rank_benchmark: operation needs nbytes and must be one of {known}; got {operation!r}")
        subject = Subject(nbytes, operation, facts=dict(facts or {}))
        self._take()
        if case_of(self._item) is None:
            return self._on_world(ways, args, rounds, subject, world_size, check, setup)
        if world_size is not None:
            raise ValueError(f"rank_benchmark: the marker names the ranks of this test; remove world_size={world_size}")
        is_simulated = not runs_in_a_rank(self._item.config)
        if self._benchmark.disabled or is_simulated:
            if not self._benchmark.disabled:
                note_untimed(self._item)
            return call_once(ways, args, setup=setup, check=check)
        device = rank_context("rank_benchmark").device
        result, record, wrong = time_on_rank(ways, args, rounds, setup=setup, check=check, device=device)
        about = asdict(replace(subject, wrong=wrong))
        note(NOTE, {"record": record.as_json(), "subject": about, "group": self._benchmark.group})
        return result

    def _on_world(
        self,
        ways: dict[str, Callable[..., Any]],
        args: tuple[Any, ...],
        rounds: Rounds,
        subject: Subject,
        world_size: int | None,
        check: Callable[[Any], int | None] | None,
        setup: Callable[[], object] | None,
    ) -> list[Any]:
        __tracebackhide__ = True
        if world_size is None:
            raise ValueError("rank_benchmark: pass world_size=2, or mark the test with @pytest.mark.world_size(2)")
        world = open_world(self._item.config, self._world, timed=True)
        if self._benchmark.disabled or world.shares_process:
            if not self._benchmark.disabled:
                note_untimed(self._item)
            return world.run(call_once, ways, args, setup=setup, check=check, world_size=world_size)
        outcomes = world.run(_time_here, ways, args, rounds, setup, check, world_size=world_size)
        wrong = {name: sum(one[2].get(name, 0) for one in outcomes) for name in outcomes[0][2]}
        found = combine([one[1] for one in outcomes], replace(subject, wrong=wrong))
        add_rows(self._item, self._benchmark.group, found, world.name)
        return [one[0] for one in outcomes]

    def _rounds(self, iterations: int | None, setup: Callable[[], object] | None) -> Rounds:
        """Return the rounds of pytest-benchmark's options and marker; with ``setup``, a sample is one call."""
        least = least_rounds(self._benchmark)
        once = 1 if setup is not None and iterations is None else iterations
        return Rounds(longest_s(self._benchmark), least, max(least, Rounds.max_rounds), once)

    def _take(self) -> None:
        """Raise an error at a second measurement, because a test has one row of one name, as with pytest-benchmark."""
        if is_used(self._benchmark):
            raise ValueError(
                f"rank_benchmark: {self._item.nodeid} has measured already; parametrize the test, or compare functions "
                "in one call with against={'name': function}"
            )
        use(self._benchmark, "rank_benchmark(...)")


def _time_here(
    ways: dict[str, Callable[..., Any]],
    args: tuple[Any, ...],
    rounds: Rounds,
    setup: Callable[[], object] | None,
    check: Callable[[Any], int | None] | None,
) -> Any:
    device: torch.device = own_device()
    return time_on_rank(ways, args, rounds, setup=setup, check=check, device=device)
