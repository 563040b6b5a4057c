"""Attributes of torch's classes and modules that a rank sets by hand: each rank has its own, as a process has.

Frameworks replace ``torch.nn.Linear.__init__`` or ``torch.empty`` with functions of their own for a while. A rank that
gives up its turn takes its changes back, and applies them again when it goes on. All ranks start with the controller's
attributes.

Comparing all attributes at each turn would take longer than a collective. CPython numbers the versions of a class: the
number is 0 after a change, and another one after the next look-up. A dict has such a number up to Python 3.12. The
numbers are in the memory of the objects, at a place that is found by experiment. One look at all of them takes less
than 1 microsecond. If the experiment fails, ranks share such changes.

Watched are ``torch.Tensor``, some modules of torch, and all layers except those that a function has made. Of layers
that are not torch's, only the methods are watched, because their other attributes are globals like any other.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.compat.python.interpreter import ABC_IMPL, gil_is_enabled
from pdlcheck.worlds.simulated.process_state.protocol import ProcessState, Rank

__all__ = ["Patches", "TorchPatches"]

_MODULES: tuple[ModuleType, ...] = (torch, nn.functional, nn.init, dist)
_ABSENT: Any = object()
_WORD = 4  # bytes
_METHODS = (FunctionType, classmethod, staticmethod, property)
# names that Python makes itself, or whose values ranks keep in another way
_PYTHONS = frozenset({
    *("__abstractmethods__", "__annotate__", "__annotations__", "__dict__", "__doc__", "__firstlineno__"),
    *("__static_attributes__", "__warningregistry__", "__weakref__", ABC_IMPL.attribute),
})  # fmt: skip


class _Target:
    """A class or a module, with its contents while the controller runs."""

    __slots__ = ("_drop", "_put", "_wanted", "contents", "target", "version_at")

    def __init__(self, target: Any, version_at: int) -> None:
        self.target, self.version_at = target, version_at
        is_module = type(target) is ModuleType
        self._put: Callable[..., None] = setattr if is_module else type.__setattr__
        self._drop: Callable[..., None] = delattr if is_module else type.__delattr__
        is_torchs = target.__name__ if is_module else target.__module__
        self._wanted = object if is_torchs.partition(".")[0] == "torch" else _METHODS
        self.note()

    def note(self) -> None:
        """Record the present contents as the controller's."""
        self.contents: dict[str, Any] = dict(vars(self.target))

    def put(self, changes: Mapping[str, Any]) -> None:
        """Set attributes, and remove those whose value is absent."""
        for name, value in changes.items():
            if value is not _ABSENT:
                self._put(self.target, name, value)
            elif name in vars(self.target):
                self._drop(self.target, name)

    def take(self) -> dict[str, Any]:
        """Restore the controller's contents, and return how the present ones differed."""
        before, now = self.contents, vars(self.target)
        changes = {name: value for name, value in now.items() if before.get(name, _ABSENT) is not value}
        changes |= dict.fromkeys(before.keys() - now.keys(), _ABSENT)
        changes = {name: value for name, value in changes.items() if self._is_patch(name, value)}
        self.put({name: before.get(name, _ABSENT) for name in changes})
        return changes

    def _is_patch(self, name: str, value: Any) -> bool:
        """Return whether a changed attribute is a patch.

        A submodule that a rank has imported is none: all ranks have it.
        """
        both = (self.contents.get(name, _ABSENT), value)
        if name in _PYTHONS or any(type(one) is ModuleType for one in both):
            return False
        return any(isinstance(one, self._wanted) and one is not _ABSENT for one in both)

    def look_up(self) -> None:
        """Look up an attribute, so that Python gives a changed class a new number."""
        getattr(self.target, "__init__", None)


Patches = Mapping[_Target, Mapping[str, Any]]
_NO_PATCHES: Patches = {}


class _Watched:
    """All targets, with the versions that the controller has."""

    def __init__(self, targets: Iterable[_Target]) -> None:
        self._targets = list(targets)
        places = np.array([one.version_at for one in self._targets], dtype=np.int64)
        start = int(places.min())
        words = ctypes.cast(start, ctypes.POINTER(ctypes.c_uint32))
        # read only at these places, because the memory between them may not exist
        self._memory = np.ctypeslib.as_array(words, shape=(int(places.max() - start) // _WORD + 1,))
        self._places = (places - start) // _WORD
        self.remember()

    def remember(self) -> None:
        """Record the versions of all targets while they hold the controller's contents."""
        for number in np.flatnonzero(self._memory[self._places] == 0):
            self._targets[number].look_up()
        self._versions = self._memory[self._places]
        self._seen = self._versions.tobytes()

    def is_as_seen(self) -> bool:
        """Return whether no target has changed. This runs at each turn."""
        return bool(self._memory[self._places].tobytes() == self._seen)

    def changed(self) -> list[_Target]:
        """Return the targets whose contents may have changed."""
        return [self._targets[number] for number in np.flatnonzero(self._memory[self._places] != self._versions)]


_watched: _Watched | None = None
_imported = -1


class TorchPatches(ProcessState):
    """The attributes that ranks have changed. A rank keeps its changes from run to run."""

    def capture(self) -> Patches:
        """Undo a rank's changes and return them."""
        if _watched is None or _watched.is_as_seen():
            return _NO_PATCHES
        patches = {target: changes for target in _watched.changed() if (changes := target.take())}
        _watched.remember()
        return patches

    def apply(self, state: Patches) -> None:
        """Apply a rank's changes again."""
        for target, changes in state.items():
            target.put(changes)

    def baseline(self) -> Callable[[], object] | None:
        """Record what is set now as the controller's. Ranks undo their own changes, so nothing is left to restore."""
        _remember_controllers()
        return None

    def begin(self, rank: Rank, kept: Patches | None) -> Patches | None:
        """Apply the changes that the rank has made in its earlier runs."""
        if kept:
            self.apply(kept)
        return kept

    def end(self, rank: Rank, kept: Any) -> Patches:
        """Undo a rank's changes and return them."""
        return self.capture()

    def give(self, rank: Rank, kept: Patches) -> Patches:
        """Apply the rank's changes in the controller."""
        self.apply(kept)
        return _NO_PATCHES

    def take_back(self) -> None:
        """Undo the changes of a rank that was given up."""
        self.capture()


def _remember_controllers() -> None:
    global _watched, _imported
    if _imported != len(sys.modules):
        targets = list(_targets())
        _watched = _Watched(targets) if targets else None
        _imported = len(sys.modules)
    elif _watched is not None and not _watched.is_as_seen():
        for target in _watched.changed():
            target.note()
        _watched.remember()


def _targets() -> Iterator[_Target]:
    if _VERSION_OF_CLASS is not None:
        for one in _classes():
            yield _Target(one, id(one) + _VERSION_OF_CLASS)
    if _VERSION_OF_DICT is not None:
        for module in _MODULES:
            yield _Target(module, id(vars(module)) + _VERSION_OF_DICT)


def _classes() -> Iterator[type]:
    """Yield tensors and layers, except layers that a function has made: those may end before the process does."""
    yield torch.Tensor
    todo, seen = [nn.Module, nn.Parameter], set()
    while todo:
        one = todo.pop()
        if one not in seen:
            seen.add(one)
            todo += type.__subclasses__(one)
            if "<locals>" not in one.__qualname__:
                yield one


def _place_of_version(held: object, kind: type, change: Callable[[], object], use: Callable[[], object]) -> int | None:
    """Return the offset of an object's version: the one word that each change changes; None if it is not found."""
    found = []
    for _ in range(3):
        use()
        before = _words(held, kind)
        change()
        use()
        both = enumerate(zip(before, _words(held, kind), strict=True))
        found.append({number for number, (old, new) in both if new and old != new})
    common = set.intersection(*found)
    return _WORD * common.pop() if len(common) == 1 else None


def _words(held: object, kind: Any) -> list[int]:
    return list((ctypes.c_uint32 * (kind.__basicsize__ // _WORD)).from_address(id(held)))


def _version_of_class() -> int | None:
    class Probe:
        number = 0

    def change() -> None:
        Probe.number += 1

    place = _place_of_version(Probe, type, change, lambda: getattr(Probe, "number"))  # noqa: B009 - a look-up
    if place is None:
        return None
    change()
    return place if _words(Probe, type)[place // _WORD] == 0 else None


def _version_of_dict() -> int | None:
    probe = {"number": 0}

    def change() -> None:
        probe["number"] += 1

    return _place_of_version(probe, dict, change, lambda: None)


_is_known = sys.implementation.name == "cpython" and gil_is_enabled()
_VERSION_OF_CLASS = _version_of_class() if _is_known else None
_VERSION_OF_DICT = _version_of_dict() if _is_known else None
