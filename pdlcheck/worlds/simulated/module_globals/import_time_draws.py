"""The warning of functions that use unseeded random values of their file, drawn when the file was imported.

Simulated ranks share these values; processes do not.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from pdlcheck.errors import UnseededImportWarning
from pdlcheck.worlds.import_streams import cure_of, drawn_by, words_of
from pdlcheck.worlds.simulated.module_globals.own_draws import modules_that_draw

__all__ = ["warning_of"]

_OF_NUMBERS = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, np.ndarray)
_told: set[tuple[str, tuple[str, ...]]] = set()


def warning_of(fn: Callable[..., Any], own_globals: Sequence[str] = ()) -> UnseededImportWarning | None:
    """Return the warning that is due before simulated ranks call ``fn``; None if there is none.

    There is one warning for each file and its globals.

    Args:
        fn: the function.
        own_globals: modules of which each rank draws the numbers for itself.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    function = fn.__func__ if isinstance(fn, MethodType) else fn
    if not isinstance(function, FunctionType):
        return None
    file = str(function.__globals__.get("__file__"))
    if not (drawn := drawn_by(file)) or modules_that_draw(own_globals, file):
        return None
    names = tuple(sorted(_used(function, {function})))
    if not names or (file, names) in _told:
        return None
    _told.add((file, names))
    return UnseededImportWarning(
        f"{words_of(file, drawn)}; {function.__qualname__} uses {', '.join(names)} of it, which simulated ranks share. "
        "On processes and on a cluster each rank draws other numbers: seed first "
        f"({cure_of(drawn)}), pass the values as arguments, or broadcast them and ignore this warning"
    )


def _used(function: FunctionType, seen: set[FunctionType]) -> Iterator[str]:
    """Yield the globals with numbers in them that the function uses.

    The functions of its file that it calls count too.
    """
    for name in _loaded(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, _OF_NUMBERS):
            yield name
        elif isinstance(value, FunctionType) and value.__globals__ is function.__globals__ and value not in seen:
            seen.add(value)
            yield from _used(value, seen)


def _loaded(code: CodeType) -> Iterator[str]:
    yield from {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _loaded(inner)
