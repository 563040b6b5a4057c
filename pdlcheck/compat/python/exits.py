"""The private names of the end of a process."""

from __future__ import annotations

import weakref
from typing import Any

from pdlcheck.compat.private import take, uses

__all__ = [
    "living_finalizers",
    "number_of_exit_functions",
    "run_exit_functions",
]

number_of_exit_functions: Any = take(
    "atexit._ncallbacks",
    "whether a template of ranks has functions to call at its end",
    lost="forks of ranks from templates",
)
run_exit_functions: Any = take(
    "atexit._run_exitfuncs",
    "the end of an idle rank, or of a launched process, which runs the functions that user code registered",
    lost="functions that user code registers with atexit",
)


@uses("weakref.finalize._registry", lost="ranks of processes need some tenths of a second longer to end")
def living_finalizers() -> list[Any]:
    """Return the ``weakref.finalize`` objects of this process, to leave out those that take long at its end."""
    alive: Any = getattr(weakref.finalize, "_registry", {})
    return list(alive)
