"""The state that the user's modules keep between calls: each object that can change, read and restored piece by piece.

A holder is a namespace (module, class, instance, function attributes), a container or a closure's cell. Its contents
are exchanged in place, so every reference to it sees them. Objects that cannot be exchanged in place (tensors, arrays,
caches, generators of random numbers) are leaves. A leaf is copied, and the copy is put where the holders had the leaf.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
import random
import sys
import sysconfig
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from pdlcheck.compat.torch.modes import disable_current_modes
from pdlcheck.tensor_bytes import bytes_of

__all__ = [
    "CachedFunction",
    "Contents",
    "MutableState",
    "find_holders",
    "identical",
    "is_installed",
    "leaf_value",
    "modules_holder",
    "own_leaves",
    "user_modules",
]

MANY = 20_000  # the largest number of objects that are examined
LONG = 10_000  # items; a longer container is left alone
LARGE = 2**24  # bytes; a larger tensor or array is left alone

_HERE = str(Path(__file__).parents[3]) + os.sep
_STDLIB = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_OPEN = (nn.Module, torch.optim.Optimizer, SimpleNamespace, Namespace)  # not the user's, but instances are walked
_CONTAINERS = ("list", "dict", "set", "deque", "OrderedDict", "defaultdict")
_TENSORS = (torch.Tensor, nn.Parameter)
_IMMUTABLE = (bool, bytes, complex, float, int, str, tuple, frozenset)

CachedFunction: Final[Any] = type(functools.cache(id))  # the class of functions with a cache
Contents = list[dict[str, Any]]  # the contents of a list of holders


def user_modules() -> dict[str, ModuleType]:
    """Return the imported modules that are neither installed nor in the standard library, by name."""
    return {
        name: module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and _is_users(name, vars(module).get("__file__"))
    }


@functools.cache
def _is_users(name: str, file: str | None) -> bool:
    if not isinstance(file, str):
        return name == "__main__"
    path = os.path.abspath(file)
    return not (path.startswith((_HERE, *_STDLIB)) or is_installed(path))


def is_installed(path: str) -> bool:
    """Return whether the path is a file of an installed package."""
    return any(folder in path for folder in _INSTALLED)


class MutableState:
    """One object whose contents are exchanged.

    Args:
        path: its name in reports: ``train.cache``.
        read: returns its contents by name; a container has the one name ``""``.
        parts: returns the objects in it, and quickly: while these are the same objects, the contents are the same.
        put: gives a name a value.
        drop: removes a name.
        nested: the names belong to the path.
        kind: the type of the whole object, for example ``dict``, if the names do not belong to the path.
        namespace: the dict in which an object or function has its attributes; most functions have none.
    """

    def __init__(
        self,
        path: str,
        read: Callable[[], dict[str, Any]],
        parts: Callable[[], tuple[Any, ...]],
        put: Callable[[str, Any], object],
        drop: Callable[[str], object],
        *,
        nested: bool = True,
        kind: str = "",
        namespace: dict[str, Any] | None = None,
    ) -> None:
        self.read, self.parts, self.put, self.drop, self.kind = read, parts, put, drop, kind
        self.namespace = namespace
        self._path, self._nested = path, nested

    @property
    def inside(self) -> str:
        """Return the kind of an object whose parts have no paths of their own; empty for a container."""
        return self.kind if self.kind not in _CONTAINERS else ""

    def path(self, name: str) -> str:
        """Return the name of this part in reports."""
        return f"{self._path}.{name}".lstrip(".") if self._nested else self._path


def modules_holder() -> MutableState:
    """Return the holder of the imported modules. A module that a rank imports is absent on other ranks."""
    parts = lambda: tuple(sys.modules.values())  # noqa: E731
    return MutableState("", user_modules, parts, sys.modules.__setitem__, sys.modules.__delitem__)


def find_holders(
    roots: Mapping[str, Any],
    modules: Mapping[str, ModuleType],
    seen: dict[int, Any],
    *,
    classes: Container[str] | None = None,
    many: int = MANY,
) -> list[MutableState]:
    """Return the holders that can be reached from the roots.

    Args:
        roots: objects by their names in reports.
        modules: the user's modules.
        seen: the objects that were examined before, by id. It is extended.
        classes: names of the modules whose classes have instances that are walked; default: ``modules``.
        many: the largest number of objects that are examined.
    """
    classes = modules if classes is None else classes
    holders: list[MutableState] = []
    todo: deque[tuple[str, Any, str]] = deque((path, value, "") for path, value in roots.items())
    while todo and len(seen) < many:
        path, value, inside = todo.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if _is(value, ModuleType) and value not in modules.values():
            continue
        for holder in _holders_of(path, value, modules, classes, inside):
            holders.append(holder)
            for name, part in holder.read().items():
                parts = part if name == "" else [part]
                todo.extend((holder.path(name), one, inside or holder.inside) for one in parts)
        todo.extend((below, part, inside) for below, part in _parts(path, value))
    return holders


def _holders_of(
    path: str, value: Any, modules: Container[str], classes: Container[str], inside: str
) -> Iterator[MutableState]:
    if _is(value, type):
        if value.__module__ in modules:
            yield MutableState(
                path,
                lambda: _visible(vars(value)) | _special_methods(vars(value)),
                lambda: tuple(vars(value).values()),
                functools.partial(type.__setattr__, value),
                functools.partial(type.__delattr__, value),
            )
        return
    if _is(value, CellType):
        fill, clear = functools.partial(setattr, value), functools.partial(delattr, value)
        yield MutableState(
            path, lambda: _of_cell(value), lambda: tuple(_of_cell(value).values()), fill, clear, nested=False
        )
    elif _is(value, list | dict | set | deque) and len(value) <= LONG:
        kind = inside or type(value).__name__
        put = lambda _, items: _refill(value, items)  # noqa: E731
        look = lambda: _parts_of_dict(value) if _is(value, dict) else tuple(value)  # noqa: E731
        yield MutableState(path, lambda: {"": _items(value)}, look, put, _keep, nested=False, kind=kind)
    users = _is(value, ModuleType | FunctionType) or type(value).__module__ in classes
    if users or _is(value, _OPEN):
        names = getattr(value, "__dict__", None)
        if type(names) is dict and not (_is(value, FunctionType) and value.__module__ not in modules):
            kind = "" if users else inside or type(value).__name__
            get, parts = lambda: _visible(names), lambda: tuple(names.values())
            put, drop = names.__setitem__, names.__delitem__
            yield MutableState(path, get, parts, put, drop, nested=users, kind=kind, namespace=names)


def _is(value: Any, kinds: Any) -> bool:
    """Return whether ``value`` is an instance of ``kinds``, without reading ``value.__class__``.

    ``isinstance`` reads it, and a proxy may then make its object, or warn.
    """
    return issubclass(type(value), kinds)


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts that are reached through an object that does not change itself, with their paths."""
    if _is(value, FunctionType):
        code = value.__code__
        names = code.co_varnames[: code.co_argcount][::-1]
        for name, default in zip(names, (value.__defaults__ or ())[::-1], strict=False):
            yield f"{path}({name}=...)", default
        for name, default in (value.__kwdefaults__ or {}).items():
            yield f"{path}({name}=...)", default
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=False):
            yield f"{path.split('.<locals>')[0]}'s {name}", cell
    elif _is(value, CachedFunction):
        yield path, value.__wrapped__
    elif _is(value, staticmethod | classmethod):
        yield path, value.__func__
    elif _is(value, property):
        yield from ((path, function) for function in (value.fget, value.fset, value.fdel))
    elif _is(value, functools.partial):
        yield from ((path, part) for part in (value.func, *value.args, *value.keywords.values()))
    elif _is(value, tuple | frozenset) and len(value) <= LONG:
        yield from ((path, part) for part in value)


def _visible(names: Any) -> dict[str, Any]:
    return {name: value for name, value in list(names.items()) if isinstance(name, str) and not _is_reserved(name)}


def _special_methods(names: Any) -> dict[str, Any]:
    """Return the special methods of a class, such as ``__init__``, which a rank may have replaced."""
    return {name: value for name, value in list(names.items()) if type(value) is FunctionType and _is_reserved(name)}


def _is_reserved(name: str) -> bool:
    """Return whether a name is Python's own, or from a tool that rewrites test files.

    A name such as ``__rank`` is a user's.
    """
    return name.startswith(("_abc_", "@")) or (name.startswith("__") and name.endswith("__"))


def _items(value: Any) -> tuple[Any, ...]:
    return tuple(dict.items(value)) if isinstance(value, dict) else tuple(value)


def _parts_of_dict(value: dict[Any, Any]) -> tuple[Any, ...]:
    return (*dict.keys(value), *dict.values(value))


def _refill(value: Any, items: tuple[Any, ...]) -> None:
    """Replace the contents by the methods of the built-in types, because a subclass may count or refuse."""
    if isinstance(value, list):
        list.__setitem__(value, slice(None), items)
    elif isinstance(value, dict):
        base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        base.clear(value)
        for key, item in items:
            base.__setitem__(value, key, item)
    elif isinstance(value, set):
        set.clear(value)
        set.update(value, items)
    else:
        deque.clear(value)
        deque.extend(value, items)


def _keep(name: str) -> None:
    """Do nothing, because a container is never without contents."""


def _of_cell(cell: CellType) -> dict[str, Any]:
    try:
        return {"cell_contents": cell.cell_contents}
    except ValueError:  # the cell is empty
        return {}


def own_leaves(contents: Contents) -> Contents:
    """Return the same contents of holders with copies of the leaves."""
    copies: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if id(value) not in copies:
            copies[id(value)] = copy_leaf(value)
        return copies[id(value)]

    def items(value: Any) -> Any:  # of a container; those of a dict are pairs
        return tuple((one[0], copied(one[1])) if type(one) is tuple and len(one) == 2 else copied(one) for one in value)

    with disable_current_modes():
        return [{name: items(value) if name == "" else copied(value) for name, value in of.items()} for of in contents]


def identical(one: Any, other: Any) -> bool:
    """Return whether both are one object, or plain values without a visible difference."""
    if one is other:
        return True
    if type(one) is not type(other) or not isinstance(one, _IMMUTABLE):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(identical, one, other))
    return bool(one == other)


def copy_leaf(value: Any) -> Any:
    """Return a copy of a leaf as it is now, and of a cache without its entries. Return anything else itself."""
    if type(value) in _TENSORS:
        return _copy_tensor(value) if value.numel() * value.element_size() <= LARGE else value
    if type(value) is np.ndarray:
        return value.copy() if value.nbytes <= LARGE else value
    if _is(value, CachedFunction):
        again: Any = functools.lru_cache(**value.cache_parameters())(value.__wrapped__)
        vars(again).update(vars(value))
        return again
    if _is(value, itertools.count):
        return itertools.count(*ast.literal_eval(f"[{repr(value)[len('count(') : -1]}]"))
    if _is(value, torch.Generator):
        return value.clone_state()
    if type(value) in (random.Random, np.random.Generator, np.random.RandomState):
        return deepcopy(value)
    return value


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_leaf:
        return deepcopy(tensor)
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _bits(tensor: torch.Tensor) -> bytes:
    plain = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return bytes_of(plain).numpy().tobytes()


def leaf_value(value: Any) -> Any:
    """Return a value that two equal leaves have in common; None for a large leaf, and for anything that is no leaf."""
    if type(value) in _TENSORS:
        if value.is_meta or value.numel() * value.element_size() > LARGE:
            return None
        grad = leaf_value(value.grad) if value.is_leaf else None
        return value.shape, value.dtype, value.layout, _bits(value.detach().cpu()), grad
    if type(value) is np.ndarray:
        return (value.shape, value.dtype, value.tobytes()) if value.nbytes <= LARGE else None
    if _is(value, CachedFunction):
        return value.cache_info().currsize
    if _is(value, itertools.count):
        return repr(value)
    if _is(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if type(value) is random.Random:
        return value.getstate()
    if type(value) in (np.random.Generator, np.random.RandomState):
        return repr((value.bit_generator if _is(value, np.random.Generator) else value).__getstate__())
    return None
