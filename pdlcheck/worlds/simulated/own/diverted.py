"""Where warnings and text of a rank go: ``catch_warnings``, ``redirect_stdout`` and their kin divert those of one rank.

So does a program that leaves text to rank 0, and gives the others a ``print`` or a stream of their own that drops it.
Python keeps that for the whole process. A rank that has diverted nothing has what the controller has. What it does to
the list of filters in place, as ``warnings.simplefilter`` outside of ``catch_warnings``, is everybody's.
"""

from __future__ import annotations

import builtins
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

__all__ = ["Diverted", "begin", "controllers", "end", "present", "put_back"]

_warnings = vars(warnings)  # ``_showwarnmsg_impl``, by which pytest.warns records, has no public name


class Diverted(NamedTuple):
    """What the modules ``warnings``, ``sys`` and ``builtins`` hold."""

    filters: Any
    shown: Any
    shown_by: Any
    out: Any
    err: Any
    prints: Any


def _read() -> Diverted:
    warned = _warnings["filters"], _warnings["showwarning"], _warnings["_showwarnmsg_impl"]
    return Diverted(*warned, sys.stdout, sys.stderr, print)


_present = _controllers = _read()


def present() -> Diverted:
    """What is in force now; the same object as long as nobody diverts anything."""
    global _present
    if (
        _present.filters is not warnings.filters  # each catch_warnings has a list of its own
        or _present.out is not sys.stdout
        or _present.err is not sys.stderr
        or _present.prints is not print
    ):
        _present = _read()
    return _present


def put_back(wanted: Diverted) -> None:
    """Put that in force, after :func:`present` has told what was."""
    global _present
    if wanted is _present:
        return
    before, _present = _present, wanted
    _warnings["filters"], _warnings["showwarning"], _warnings["_showwarnmsg_impl"], *_ = wanted
    sys.stdout, sys.stderr = wanted.out, wanted.err
    if before.prints is not wanted.prints:
        builtins.print = wanted.prints
    if before.shown_by is not wanted.shown_by or before.shown is not wanted.shown or before.filters != wanted.filters:
        with warnings.catch_warnings():  # Python forgets which warnings were shown: not to this rank
            pass


def begin(kept: Diverted | None) -> None:
    """A rank starts, with the warnings that it has kept from the run before."""
    put_back(_controllers if kept is None else kept._replace(**_text(_controllers)))


def end(*, leaves: bool) -> Diverted | None:
    """A rank has ended: what it keeps for the next run, if anything.

    ``leaves``: it has set up, or taken down, what later runs are to have: its streams, as those of pytest's capsys, are
    everybody's.
    """
    global _controllers
    left = present()
    if leaves and _text(left) != _text(_controllers):
        _controllers = _controllers._replace(**_text(left))
    return None if left.filters is _controllers.filters else left


def _text(diverted: Diverted) -> dict[str, Any]:
    """Where text goes."""
    return {"out": diverted.out, "err": diverted.err, "prints": diverted.prints}


@contextmanager
def controllers() -> Iterator[None]:
    """Give the controller its own warnings after the block."""
    global _controllers, _present
    _controllers = _present = _read()
    try:
        yield
    finally:
        present()
        put_back(_controllers)
