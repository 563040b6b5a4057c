"""The private names of imports."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Final

from pdlcheck.compat.private import name, uses

__all__ = [
    "IMPORT_FRAME",
    "is_initializing",
    "module_locks",
]

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


@uses("importlib._bootstrap._module_locks", lost="a simulated rank that communicates in an import blocks the others")
def module_locks() -> dict[str, Any]:
    """Return the locks of modules that are being imported, by name; an empty dict if Python does not keep them so."""
    return getattr(importlib._bootstrap, "_module_locks", {})
