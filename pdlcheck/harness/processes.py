"""A marked item on rank processes: each of them keeps a pytest session that runs the item's phases."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from pdlcheck.harness import rank_session
from pdlcheck.harness.cases import Case
from pdlcheck.harness.reports import RANK_REPORT
from pdlcheck.worlds import Ranks, World
from pdlcheck.worlds.outcome import Outcome, Raised, results

__all__ = ["ProcessItem"]


class ProcessItem:
    """Implements ``RankedItem`` for worlds whose ranks are processes."""

    def __init__(self, item: pytest.Function, case: Case, world: World) -> None:
        self._item = item
        self._case = case
        self._world = world
        self._stack = ExitStack()
        self._ranks: Ranks | None = None

    def setup(self) -> None:
        ranks = self._ranks = self._stack.enter_context(self._world.open(self._case.world_size))
        session = rank_session.describe(self._item.config)
        _results(ranks.outcomes(rank_session.setup, session, str(self._item.path), self._item.nodeid))

    def call(self, drawn: dict[str, Any]) -> None:
        __tracebackhide__ = True
        assert self._ranks is not None
        if not self._ranks.intact:  # an earlier example ended in a failure that took ranks with it
            self._stack.close()
            self.setup()
        _results(self._ranks.outcomes(rank_session.call, self._item.nodeid, drawn))

    def teardown(self) -> None:
        with self._stack:
            if self._ranks is not None and self._ranks.intact:
                _results(self._ranks.outcomes(rank_session.teardown, self._item.nodeid))


def _results(outcomes: Sequence[Outcome]) -> None:
    """Raise the first cause; where its rank rendered a report, the bare traceback is left out."""
    __tracebackhide__ = True
    results(
        [
            replace(outcome, traceback="", output="")
            if isinstance(outcome, Raised) and hasattr(outcome.error, RANK_REPORT)
            else outcome
            for outcome in outcomes
        ]
    )
