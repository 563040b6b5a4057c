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
    """Raise the first cause; where a rank rendered a report, that stands for the bare traceback."""
    __tracebackhide__ = True
    first = min((o.order for o in outcomes if isinstance(o, Raised)), default=0)
    results([_rendered(o, is_first=o.order == first) if isinstance(o, Raised) else o for o in outcomes])


def _rendered(outcome: Raised, *, is_first: bool) -> Raised:
    """The first cause's report is shown by :mod:`pdlcheck.harness.reports`, those of other failures in the notes."""
    report = getattr(outcome.error, RANK_REPORT, None)
    if report is None:
        return outcome
    return replace(outcome, traceback="" if is_first else report, output="")
