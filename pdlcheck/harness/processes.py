"""A marked item on rank processes: each of them keeps a pytest session that runs the item's phases."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from pdlcheck.harness import rank_session
from pdlcheck.harness.cases import Case
from pdlcheck.harness.examples import RANK_FIXTURES, is_property
from pdlcheck.harness.reports import RANK_REPORT
from pdlcheck.worlds import Ranks, World
from pdlcheck.worlds.outcome import Outcome, Raised, results

__all__ = ["ProcessItem"]

_OURS = RANK_FIXTURES - {"subject"}  # which fails where --subject leads nowhere


class ProcessItem:
    """Implements ``RankedItem`` for worlds whose ranks are processes."""

    def __init__(self, item: pytest.Function, case: Case, world: World) -> None:
        self._item = item
        self._case = case
        self._world = world
        self._stack = ExitStack()
        self._ranks: Ranks | None = None
        self._at_once = not is_property(item) and _sets_up_nothing(item)
        self._begun = False  # some rank may have set something up
        self._ended = False  # every rank has torn down what it had set up

    def setup(self) -> None:
        ranks = self._ranks = self._stack.enter_context(self._world.open(self._case.world_size))
        if not self._at_once:
            self._begun = True
            _results(ranks.outcomes(rank_session.setup, *self._place()))

    def call(self, drawn: dict[str, Any]) -> None:
        __tracebackhide__ = True
        assert self._ranks is not None
        if not self._ranks.intact:  # an earlier example ended in a failure that took ranks with it
            self._stack.close()
            self.setup()
        self._begun = True
        if self._at_once:
            outcomes = self._ranks.outcomes(rank_session.run, *self._place())
        else:
            outcomes = self._ranks.outcomes(rank_session.call, self._item.nodeid, drawn)
        self._ended = all(_results(outcomes))

    def teardown(self) -> None:
        with self._stack:
            if self._ranks is not None and self._ranks.intact and self._begun and not self._ended:
                _results(self._ranks.outcomes(rank_session.teardown, self._item.nodeid))

    def _place(self) -> tuple[bytes, str, str]:
        return rank_session.describe(self._item.config), str(self._item.path), self._item.nodeid


def _sets_up_nothing(item: pytest.Function) -> bool:
    """True if the item has no fixture of the user's or of another plugin, so that its set-up cannot fail."""
    parameters = item.callspec.params
    definitions = item._fixtureinfo.name2fixturedefs
    return all(
        name in parameters or name == "request" or (name in _OURS and len(definitions[name]) == 1)
        for name in item.fixturenames
    )


def _results(outcomes: Sequence[Outcome]) -> list[Any]:
    """Return the results or raise the first cause; a report that a rank rendered replaces its traceback."""
    __tracebackhide__ = True
    first = min((o.order for o in outcomes if isinstance(o, Raised)), default=0)
    return results([_rendered(o, is_first=o.order == first) if isinstance(o, Raised) else o for o in outcomes])


def _rendered(outcome: Raised, *, is_first: bool) -> Raised:
    """The first cause's report is shown by :mod:`pdlcheck.harness.reports`, those of other failures in the notes."""
    report = getattr(outcome.error, RANK_REPORT, None)
    if report is None:
        return outcome
    return replace(outcome, traceback="" if is_first else report, output="")
