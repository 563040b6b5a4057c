"""The warnings and text of a rank: ``catch_warnings``, ``redirect_stdout`` and similar tools divert those of one rank.

A program may also leave text to rank 0, and give other ranks a ``print`` or a stream that drops it. Python keeps all of
this for the whole process. A rank that has diverted nothing has the controller's settings. Changes to the list of
filters in place, such as ``warnings.simplefilter`` outside of ``catch_warnings``, apply to every rank.
"""

from __future__ import annotations

import builtins
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from pdlcheck.compat.python.warnings import read_warnings, set_warnings
from pdlcheck.worlds.simulated.process_state.protocol import Rank, RunState

__all__ = ["Stdio", "StdioState"]


class StdioState(NamedTuple):
    """The values that the modules ``warnings``, ``sys`` and ``builtins`` hold."""

    filters: Any
    shown: Any
    shown_by: Any
    out: Any
    err: Any
    prints: Any


def _read() -> StdioState:
    return StdioState(*read_warnings(), sys.stdout, sys.stderr, print)


class Stdio(RunState):
    """The warnings settings and the streams of text. A rank keeps its warnings settings from run to run."""

    start: StdioState  # the controller's, with the text streams that a set-up run has left to all ranks

    def __init__(self) -> None:
        self._present = self.start = _read()

    def capture(self) -> StdioState:
        """Return the values in force. The object stays the same as long as no code diverts anything."""
        present = self._present
        if (
            present.filters is not warnings.filters  # each catch_warnings makes a new list
            or present.out is not sys.stdout
            or present.err is not sys.stderr
            or present.prints is not print
        ):
            self._present = present = _read()
        return present

    def apply(self, state: StdioState) -> None:
        """Put ``state`` in force. Call :meth:`capture` first, which reads the values that are in force."""
        before = self._present
        if state is before:
            return
        self._present = state
        set_warnings(state.filters, state.shown, state.shown_by)
        sys.stdout, sys.stderr = state.out, state.err
        if before.prints is not state.prints:
            builtins.print = state.prints
        if before.shown_by is not state.shown_by or before.shown is not state.shown or before.filters != state.filters:
            with warnings.catch_warnings():  # Python forgets the shown warnings, because this rank has not shown them
                pass

    def baseline(self) -> Callable[[], object] | None:
        """Record the controller's warnings and text, and return the function that restores them."""
        self.start = self._present = _read()
        return self._restore

    def _restore(self) -> None:
        self.capture()
        self.apply(self.start)

    def begin(self, rank: Rank, kept: StdioState | None) -> StdioState | None:
        """Start a rank with the warnings settings that it has kept from its previous run, if any."""
        self.apply(self.start if kept is None else kept._replace(**_text(self.start)))
        return kept

    def end(self, rank: Rank, kept: Any) -> StdioState | None:
        """Return what the rank keeps for its next run; None if it keeps nothing.

        If the run has set up, or torn down, state for later runs, all ranks get its text streams, for example those of
        pytest's capsys.
        """
        left = self.capture()
        if rank.leaves_streams and _text(left) != _text(self.start):
            self.start = self.start._replace(**_text(left))
        return None if left.filters is self.start.filters else left


def _text(diverted: StdioState) -> dict[str, Any]:
    """Return the destinations of text."""
    return {"out": diverted.out, "err": diverted.err, "prints": diverted.prints}
