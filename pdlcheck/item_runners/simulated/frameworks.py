"""The framework whose own check has failed; it may keep a rank's state in its modules."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import pytest

__all__ = ["modules_of_framework"]

_NOT_FRAMEWORKS = ("_pytest", "numpy", "pdlcheck", "pluggy", "pytest", "torch")
_AT_MOST = 400  # modules, because each one is searched


def modules_of_framework(failure: pytest.TestReport | None) -> list[str]:
    """Return the modules of the innermost installed package in which a test has failed; empty if it failed in none.

    For a large package, return only the modules of the part in which the test has failed.
    """
    from pdlcheck.worlds.simulated.module_globals.mutable_state import is_installed  # this import loads torch

    by_file = {str(getattr(module, "__file__", None)): name for name, module in list(sys.modules.items())}
    trace: Any = getattr(getattr(failure, "longrepr", None), "reprtraceback", None)
    for entry in reversed(getattr(trace, "reprentries", ())):
        # The report shows a relative path.
        path = os.path.abspath(str(getattr(getattr(entry, "reprfileloc", None), "path", "")))
        name = by_file.get(path, "")
        if name and is_installed(path) and name.partition(".")[0] not in _NOT_FRAMEWORKS:
            return _part(name)
    return []


def _part(name: str) -> list[str]:
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        package = ".".join(parts[:depth])
        found = [one for one, module in list(sys.modules.items()) if _is_in(package, one, module)]
        if len(found) <= _AT_MOST:
            # Packages, which stand for all modules below them, come last.
            return sorted(found, key=lambda one: hasattr(sys.modules[one], "__path__"))
    return []


def _is_in(package: str, name: str, module: object) -> bool:
    return isinstance(module, ModuleType) and f"{name}.".startswith(f"{package}.")
