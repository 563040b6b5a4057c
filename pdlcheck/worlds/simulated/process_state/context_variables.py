"""The context variables of Python, which it keeps by thread. Ranks start with the controller's.

numpy's error handling and decimal's precision are such variables.
"""

from __future__ import annotations

import contextvars
import decimal
from collections.abc import Callable, Mapping
from typing import Any

from pdlcheck.worlds.decimals import is_same
from pdlcheck.worlds.simulated.process_state.protocol import Rank, RunState

__all__ = ["ContextVariables"]

_ABSENT: Any = object()


class ContextVariables(RunState):
    """The context in which the code of a rank runs.

    A rank keeps its context from run to run. Before each run, it takes over the variables that the controller has
    changed since.
    """

    at_switches = False
    start: contextvars.Context
    _decimals: decimal.Context | None = None  # a copy of the controller's decimal context

    def capture(self) -> contextvars.Context:
        """Return a copy of the present context."""
        return contextvars.copy_context()

    def apply(self, state: contextvars.Context) -> None:
        """Set the variables of a context in the present one."""
        _put_variables(state, {})

    def baseline(self) -> Callable[[], object] | None:
        """Record the controller's context. Ranks have threads of their own, so there is nothing to restore."""
        self.start = self.capture()
        self._decimals = self.start.run(_set_decimals, self._decimals)
        return None

    def begin(self, rank: Rank, kept: contextvars.Context | None) -> contextvars.Context:
        """Make the context of the run; return the one of the controller."""
        if kept is None:
            rank.context = self.start.copy()
            rank.context.run(_set_decimals, None)  # ``decimal`` changes its context in place
        else:
            rank.context.run(_put_variables, self.start, kept)
        return self.start

    def give(self, rank: Rank, kept: contextvars.Context) -> contextvars.Context:
        """Set the variables that the rank has changed in the controller's context."""
        _put_variables(rank.context, kept)
        return kept


def _put_variables(context: contextvars.Context, since: Mapping[contextvars.ContextVar[Any], Any]) -> None:
    """Set, in the present context, the variables of ``context`` whose values differ from ``since``."""
    for variable, value in context.items():
        if since.get(variable, _ABSENT) is value or variable.get(_ABSENT) is value:
            continue
        if not isinstance(value, decimal.Context):
            variable.set(value)
        elif not is_same(value, decimal.getcontext()):
            decimal.setcontext(value.copy())


def _set_decimals(seen: decimal.Context | None) -> decimal.Context:
    """Set the decimal context of the present context, and return it.

    It is ``seen`` if that has the same settings, else a copy of the present one.
    """
    now = decimal.getcontext()
    if seen is None or not is_same(now, seen):
        seen = now.copy()
    decimal.setcontext(seen)
    return seen
