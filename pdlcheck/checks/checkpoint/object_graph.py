"""The objects that a program's functions reach, directly and in turn: closures, globals, bound objects, containers."""

from __future__ import annotations

import collections
import dis
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Reached", "has_state", "is_of_the_program", "reached"]

DEPTH = 8  # helpers, objects and containers on the path to an object
MOST = 20_000  # objects to examine
WIDTH = 256  # entries of a container to examine; enough for a list of callbacks, and a data set has more

_HOLDERS = ("types", "argparse")  # standard modules with classes that hold a program's own objects


@dataclass(frozen=True)
class Reached:
    """An object, with the name that its holder uses for it, and a longer name that includes the holder."""

    name: str
    long_name: str
    held: Any


def reached(functions: tuple[Callable[..., object], ...]) -> list[Reached]:
    """Return all objects that ``functions`` reach, the nearest first; an object appears once for each holder.

    The search opens these objects:

    - functions and methods of the program, through their decorators;
    - dicts, lists, tuples and deques;
    - objects of the program that have no state of their own, and the globals that their methods name.

    Among the objects of libraries it opens only those that a function holds itself. It opens no objects of torch,
    numpy and the standard library.
    """
    found: list[Reached] = []
    opened: dict[int, Any] = {}  # keeps the objects alive, so that no other object gets the same id
    ahead = collections.deque([(one, 1) for function in functions for one in _held_by(function)])
    while ahead and len(found) < MOST:
        one, depth = ahead.popleft()
        found.append(one)
        if id(one.held) not in opened and depth < DEPTH:
            opened[id(one.held)] = one.held
            ahead.extend((inner, depth + 1) for inner in _inside(one, nearest=depth == 1))
    return found


def has_state(held: object) -> bool:
    """Return whether an object has a state that can be read and restored."""
    if inspect.isclass(held) or inspect.ismodule(held):
        return False
    return isinstance(held, torch.Generator) or all(
        callable(getattr(held, name, None)) for name in ("state_dict", "load_state_dict")
    )


def is_of_the_program(held: Any) -> bool:
    """Return whether an object of the program holds others, such as a trainer does, and has no state of its own."""
    if inspect.isclass(held) or inspect.ismodule(held) or inspect.isroutine(held) or not hasattr(held, "__dict__"):
        return False
    module = type(held).__module__
    return (module in _HOLDERS or not _is_of_the_interpreter(module)) and not has_state(held)


def _inside(one: Reached, *, nearest: bool) -> Iterator[Reached]:
    held, name, long_name = one.held, one.name, one.long_name
    if isinstance(held, dict):
        for place, (key, value) in enumerate(list(held.items())[:WIDTH]):
            label = f"{long_name}[{key!r}]" if isinstance(key, str | int) else f"{long_name}[{place}]"
            yield Reached(key if isinstance(key, str) else f"{name}[{place}]", label, value)
    elif isinstance(held, list | tuple | collections.deque):
        first = list(itertools.islice(held, WIDTH))
        yield from (Reached(f"{name}[{i}]", f"{long_name}[{i}]", value) for i, value in enumerate(first))
    elif inspect.isroutine(held) or isinstance(held, functools.partial):
        yield from (Reached(inner.name, f"{long_name}.{inner.name}", inner.held) for inner in _held_by(held))
    elif is_of_the_program(held) and (nearest or not _is_of_a_library(type(held).__module__)):
        yield from (Reached(f"{name}.{key}", f"{long_name}.{key}", value) for key, value in list(vars(held).items()))
        yield from _methods_of(held)


def _held_by(function: Any) -> Iterator[Reached]:
    """Yield the objects that a function has names for.

    These are the arguments of a partial, the attributes of the object of a method, the free variables and the globals.
    """
    while isinstance(function, functools.partial):
        yield from (Reached(name, name, value) for name, value in function.keywords.items())
        yield from (Reached(f"argument {i}", f"argument {i}", value) for i, value in enumerate(function.args))
        function = function.func
    holder = getattr(function, "__self__", None) if inspect.ismethod(function) else function
    if holder is not None and not inspect.isroutine(holder):
        kind = type(holder).__name__
        if has_state(holder):
            yield Reached(kind, kind, holder)
        elif is_of_the_program(holder):
            yield from (Reached(key, f"{kind}.{key}", value) for key, value in list(vars(holder).items()))
            yield from _methods_of(holder)
        function = getattr(function if inspect.ismethod(function) else type(function).__call__, "__func__", None)
    if not inspect.isfunction(function) or _is_of_a_library(function.__module__):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield Reached(name, name, cell.cell_contents)
        except ValueError:  # the name is not bound yet
            continue
    for name in _globals_in(function.__code__):
        if name in function.__globals__:
            yield Reached(name, name, function.__globals__[name])


def _methods_of(held: object) -> Iterator[Reached]:
    """Yield the methods of an object as functions, because they name globals of the program."""
    for kind in type(held).__mro__:
        for name, value in list(vars(kind).items()):
            function = getattr(value, "__func__", value)
            if inspect.isfunction(function) and not _is_of_a_library(function.__module__):
                yield Reached(name, f"{kind.__name__}.{name}", function)


@functools.lru_cache(maxsize=4096)
def _globals_in(code: types.CodeType) -> dict[str, None]:
    """Return the globals that a function and its inner functions name."""
    names = dict.fromkeys(
        one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )
    for inner in code.co_consts:
        if inspect.iscode(inner):
            names |= _globals_in(inner)
    return names


def _is_of_the_interpreter(module: str) -> bool:
    root = module.partition(".")[0]
    return root in ("numpy", "torch") or (root in sys.stdlib_module_names and root != "__main__")


def _is_of_a_library(module: str | None) -> bool:
    """Return whether a module was installed, or belongs to Python or to this package outside of its suites."""
    if not module:
        return False
    root = module.partition(".")[0]
    if root == "pdlcheck" and not module.startswith("pdlcheck.suites"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return _is_of_the_interpreter(module) or "site-packages" in file or "dist-packages" in file
