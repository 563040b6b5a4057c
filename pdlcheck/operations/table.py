"""The table of the operations: every file of this folder that has one."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

import pdlcheck.operations as folder
from pdlcheck.operations.kind import OperationKind
from pdlcheck.operations.method import Method

__all__ = ["METHODS", "OPERATIONS"]


def _found() -> dict[str, OperationKind]:
    kinds = {}
    for name in sorted(module.name for module in iter_modules(folder.__path__)):
        if name != "table":
            for value in vars(import_module(f"{folder.__name__}.{name}")).values():
                if isinstance(value, OperationKind):
                    kinds[value.name] = value
    return kinds


OPERATIONS: Mapping[str, OperationKind] = _found()
METHODS: Mapping[str, Method] = {method.name: method for kind in OPERATIONS.values() for method in kind.methods}
