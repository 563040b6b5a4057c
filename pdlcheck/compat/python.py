"""The private names of Python's standard library."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any, Final

from pdlcheck.compat.private import name, take, uses

__all__ = [
    "IMPORT_FRAME",
    "encoded_environment",
    "exchange_active_mocks",
    "is_initializing",
    "living_finalizers",
    "mock_patches",
    "name_test_method",
    "number_of_exit_functions",
    "option_actions",
    "patch_dict",
    "records_warnings",
    "run_exit_functions",
    "unpatch_dict",
]

# -- the end of the process ------------------------------------------------------------------------

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


# -- imports ---------------------------------------------------------------------------------------

_find_and_load: Final = name(
    "importlib._bootstrap._find_and_load",
    "whether a thread that sleeps holds the import lock",
    lost="simulated ranks that sleep during an import block the others",
)
IMPORT_FRAME: Final = ("<frozen importlib._bootstrap>", _find_and_load.attribute)  # file and function


@uses("importlib._bootstrap._load_unlocked._initializing", lost="stand-ins in a module that is half imported")
def is_initializing(module: ModuleType) -> bool:
    """Return whether a module is still being imported."""
    return getattr(module.__spec__, "_initializing", False)


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


# -- arguments, mocks and test cases --------------------------------------------------------------


@uses("argparse.ArgumentParser._actions", lost="a warning about options that rank processes do not get")
def option_actions(parser: Any) -> list[Any]:
    """Return the options of a parser, as actions of argparse."""
    return parser._actions  # type: ignore[no-any-return]


@uses("unittest.mock._patch", "unittest.mock._patch_dict", lost="unittest.mock.patch on simulated ranks")
def mock_patches() -> tuple[Any, Any]:
    """Return the classes of ``unittest.mock.patch`` and ``patch.dict``."""
    from unittest import mock  # takes milliseconds

    return vars(mock)["_patch"], vars(mock)["_patch_dict"]  # the type stubs declare only one of them


@uses("unittest.mock._patch._active_patches", lost="mock.patch.stopall on simulated ranks")
def exchange_active_mocks(patch: Any, active: list[Any]) -> list[Any]:
    """Replace the list of the patches that ``start`` has entered; return the list in force until now."""
    patch._active_patches, before = active, patch._active_patches
    return before  # type: ignore[no-any-return]


@uses("unittest.mock._patch_dict._patch_dict", lost="mock.patch.dict on simulated ranks")
def patch_dict(patch: Any) -> None:
    """Apply a ``patch.dict``."""
    patch._patch_dict()


@uses("unittest.mock._patch_dict._unpatch_dict", lost="mock.patch.dict on simulated ranks")
def unpatch_dict(patch: Any) -> None:
    """Take a ``patch.dict`` back."""
    patch._unpatch_dict()


@uses(
    "unittest.case.TestCase._testMethodName", "unittest.case.TestCase._testMethodDoc", lost="unittest methods on ranks"
)
def name_test_method(case: Any, method: Any) -> None:
    """Let a ``TestCase`` name this method in ``id`` and ``shortDescription``."""
    case._testMethodName, case._testMethodDoc = method.__name__, method.__doc__
