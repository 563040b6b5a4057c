"""Copies of a collected test, each with a request, arguments, fixtures and an instance of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from pdlcheck.compat.private import uses

__all__ = ["ItemCopy", "copy_of", "release_copy", "show_copy"]

_OF_SET_UP = ("_instance", "_obj", "_request", "funcargs")  # pytest makes them anew for each set-up
_FIXED = ("config", "parent", "path", "session")  # pytest reads them often and never changes them
_OWN = frozenset({*_OF_SET_UP, *_FIXED, "_fixtureinfo", "collected", "finalizers", "obj", "user_properties"})


class ItemCopy:
    """The base of the classes of copies: everything except a few attributes is that of the collected item.

    So a hook that is called with the collected item sees what a fixture does to its ``request.node``, and the other way
    round: the stash, markers, report sections, and attributes of plugins. For the same reason the two are equal: a
    plugin may use either as a key. pytest itself looks a copy up among the items that are set up.

    Attributes:
        collected: the item that this is a copy of.
        finalizers: what pytest or the test has added with ``addfinalizer``.
    """

    collected: pytest.Function
    finalizers: list[Callable[[], object]]

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # not set yet
            raise AttributeError(name)
        return getattr(self.collected, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.collected, name, value)

    def __delattr__(self, name: str) -> None:
        if name in _OWN:
            object.__delattr__(self, name)
        else:
            delattr(self.collected, name)

    def __eq__(self, other: object) -> bool:
        return self.collected is getattr(other, "collected", other)

    def __hash__(self) -> int:
        return hash(self.collected)

    def addfinalizer(self, finalizer: Callable[[], object]) -> None:
        """Add a finalizer to this copy, in place of the item's."""
        self.finalizers.append(finalizer)


@cache
def _kind(of: type[pytest.Function]) -> Any:
    """Return the class of the copies of such items; its name is the same, because reports have it."""
    metaclass: Any = type(of)
    return metaclass(of.__name__, (ItemCopy, of), {"__module__": of.__module__, "__qualname__": of.__qualname__})


def copy_of(item: pytest.Function, definitions: dict[str, Any]) -> Any:
    """Return a copy of an item, which uses these definitions of fixtures; it has no instance of a class yet."""
    # The attributes that ``__init__`` sets are those of the collected item.
    copied = object.__new__(_kind(type(item)))
    copied.collected = item
    for name in _FIXED:
        setattr(copied, name, getattr(item, name))
    copied.finalizers, copied.user_properties = [], []
    copied._fixtureinfo = replace(item._fixtureinfo, name2fixturedefs=definitions)
    copied._initrequest()
    if item.cls is None:
        copied.obj = item.obj
    return copied


@uses("_pytest.python.PyobjMixin._obj", lost="tests on simulated ranks")
def show_copy(item: pytest.Function, copied: Any) -> None:
    """Let plugins see, in the collected item, the arguments and the instance of a copy."""
    vars(item).update({name: value for name, value in vars(copied).items() if name in _OF_SET_UP})


def release_copy(copied: Any) -> None:
    """Drop the arguments and the instance of a copy, as pytest does when a test has ended."""
    for name in _OF_SET_UP:
        vars(copied).pop(name, None)
