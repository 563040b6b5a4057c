"""The private names of Python's standard library."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Mapping
from types import FunctionType
from typing import Any, Final

from pdlcheck.compat.private import name, take, uses

__all__ = [
    "IMPORT_FRAME",
    "encoded_environment",
    "living_finalizers",
    "number_of_exit_functions",
    "records_warnings",
    "run_exit_functions",
]

# -- the end of the process ------------------------------------------------------------------------

number_of_exit_functions: Any = take(
    "atexit._ncallbacks",
    "whether a template of ranks has functions to call at its end",
    lost="forks of ranks from templates",
)
run_exit_functions: Any = take(
    "atexit._run_exitfuncs",
    "the end of an idle rank, which runs the functions that user code registered",
    lost="functions that user code registers with atexit in ranks",
)


@uses("weakref.finalize._registry", lost="ranks of processes need some tenths of a second longer to end")
def living_finalizers() -> list[Any]:
    """Return the ``weakref.finalize`` objects of this process, to leave out those that take long at its end."""
    alive: Any = getattr(weakref.finalize, "_registry", {})
    return list(alive)


# -- imports ---------------------------------------------------------------------------------------

_find_and_load: Final = name(
    "importlib._bootstrap._find_and_load",
    "whether a thread that sleeps holds the import lock",
    lost="simulated ranks that sleep during an import block the others",
)
IMPORT_FRAME: Final = ("<frozen importlib._bootstrap>", _find_and_load.attribute)  # file and function


# -- environment -----------------------------------------------------------------------------------


@uses("os._Environ._data", lost="each call of ranks takes longer")
def encoded_environment() -> Mapping[Any, Any] | None:
    """Return the environment as bytes, to see quickly whether it has changed; None if Python does not keep it so."""
    return getattr(os.environ, "_data", None)


# -- warnings --------------------------------------------------------------------------------------

_warnings: Final = vars(warnings)


@uses(
    "warnings._showwarnmsg_impl",
    "warnings._showwarning_orig",
    lost="pytest.warns and recwarn get no warnings of ranks of processes",
)
def records_warnings() -> bool:
    """Return whether warnings are recorded, as in ``catch_warnings(record=True)``, or shown by a program's function."""
    if not isinstance(_warnings["_showwarnmsg_impl"], FunctionType):  # a recorder puts a list's method there
        return True
    return warnings.showwarning is not _warnings.get("_showwarning_orig")
