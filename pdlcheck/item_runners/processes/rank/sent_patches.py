"""The controller's ``MonkeyPatch`` in a function that rank processes run: an argument, or a value of a closure.

Each rank process gets a new one. Its patches are undone when the function ends, because the process runs other tests
later, and the teardown of the fixture undoes patches only in the controller.
"""

from __future__ import annotations

import pytest

__all__ = ["arrived", "let_patches_travel"]

_here: list[pytest.MonkeyPatch] = []  # the new ones of the current call


def let_patches_travel() -> None:
    """Pickle a ``MonkeyPatch`` as a new one: its patches may contain modules, which cannot be pickled."""
    from pdlcheck.worlds.processes.exchange.payload import made_anew

    made_anew[pytest.MonkeyPatch] = arrived


def arrived() -> pytest.MonkeyPatch:
    """Return the new ``MonkeyPatch`` of a rank; unpickling calls this."""
    from pdlcheck.worlds.processes.rank.exit_callbacks import after_calls

    if _undo_all not in after_calls:
        after_calls.append(_undo_all)
    _here.append(pytest.MonkeyPatch())
    return _here[-1]


def _undo_all() -> None:
    while _here:
        _here.pop().undo()
