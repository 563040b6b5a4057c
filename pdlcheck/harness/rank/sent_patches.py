"""A ``MonkeyPatch`` of the controller that a function takes along to the ranks, as an argument or in a closure.

On a rank process it is one that has set nothing yet. What it sets there is undone when the function ends: the process
goes on to other tests, and the fixture's teardown reaches the controller alone.
"""

from __future__ import annotations

import pytest

__all__ = ["arrived", "let_patches_travel"]

_here: list[pytest.MonkeyPatch] = []  # those of the call that is under way


def let_patches_travel() -> None:
    """From now on a ``MonkeyPatch`` is sent as said above; pickle would try to send what it has set."""
    pytest.MonkeyPatch.__reduce__ = lambda _: (arrived, ())  # type: ignore[method-assign, assignment]


def arrived() -> pytest.MonkeyPatch:
    """What the function of a rank has instead."""
    from pdlcheck.worlds.processes.rank.at_end import after_calls

    if _undo_all not in after_calls:
        after_calls.append(_undo_all)
    _here.append(pytest.MonkeyPatch())
    return _here[-1]


def _undo_all() -> None:
    while _here:
        _here.pop().undo()
