"""The warnings and text of a rank: ``catch_warnings``, ``redirect_stdout`` and similar tools divert those of one rank.

A program may also leave text to rank 0, and give other ranks a ``print`` or a stream that drops it. Python keeps all of
this for the whole process. A rank that has diverted nothing has the controller's settings. Changes to the list of
filters in place, such as ``warnings.simplefilter`` outside of ``catch_warnings``, apply to every rank.
"""

from __future__ import annotations

import builtins
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

__all__ = ["StdioState", "begin", "controllers", "end", "present", "put_back"]

_warnings = vars(warnings)  # ``_showwarnmsg_impl``, by which pytest.warns records, has no public name


class StdioState(NamedTuple):
    """The values that the modules ``warnings``, ``sys`` and ``builtins`` hold."""

    filters: Any
    shown: Any
    shown_by: Any
    out: Any
    err: Any
    prints: Any


def _read() -> StdioState:
    warned = _warnings["filters"], _warnings["showwarning"], _warnings["_showwarnmsg_impl"]
    return StdioState(*warned, sys.stdout, sys.stderr, print)


_present = _controllers = _read()


def present() -> StdioState:
    """Return the values in force. The object stays the same as long as no code diverts anything."""
    global _present
    if (
        _present.filters is not warnings.filters  # each catch_warnings makes a new list
        or _present.out is not sys.stdout
        or _present.err is not sys.stderr
        or _present.prints is not print
    ):
        _present = _read()
    return _present


def put_back(wanted: StdioState) -> None:
    """Put ``wanted`` in force. Call :func:`present` first, which reads the values that are in force."""
    global _present
    if wanted is _present:
        return
    before, _present = _present, wanted
    _warnings["filters"], _warnings["showwarning"], _warnings["_showwarnmsg_impl"], *_ = wanted
    sys.stdout, sys.stderr = wanted.out, wanted.err
    if before.prints is not wanted.prints:
        builtins.print = wanted.prints
    if before.shown_by is not wanted.shown_by or before.shown is not wanted.shown or before.filters != wanted.filters:
        with warnings.catch_warnings():  # Python forgets the shown warnings, because this rank has not shown them
            pass


def begin(kept: StdioState | None) -> None:
    """Start a rank with the warnings settings that it has kept from its previous run, if any."""
    put_back(_controllers if kept is None else kept._replace(**_text(_controllers)))


def end(*, leaves: bool) -> StdioState | None:
    """Return what a rank that has ended keeps for its next run; None if it keeps nothing.

    ``leaves``: the rank has set up, or torn down, state for later runs. All ranks then get its streams, for example
    those of pytest's capsys.
    """
    global _controllers
    left = present()
    if leaves and _text(left) != _text(_controllers):
        _controllers = _controllers._replace(**_text(left))
    return None if left.filters is _controllers.filters else left


def _text(diverted: StdioState) -> dict[str, Any]:
    """Return the destinations of text."""
    return {"out": diverted.out, "err": diverted.err, "prints": diverted.prints}


@contextmanager
def controllers() -> Iterator[None]:
    """Restore the controller's own warnings and text after the block."""
    global _controllers, _present
    _controllers = _present = _read()
    try:
        yield
    finally:
        present()
        put_back(_controllers)
