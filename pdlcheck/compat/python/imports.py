"""The private names of imports."""

from __future__ import annotations

from types import ModuleType
from typing import Final

from pdlcheck.compat.private import name, uses

__all__ = [
    "IMPORT_FRAME",
    "is_initializing",
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
