"""Attributes of torch's classes and modules that a rank sets by hand: each rank has its own, as a process has.

Frameworks replace ``torch.nn.Linear.__init__`` or ``torch.empty`` with functions of their own for a while. A rank that
gives up its turn takes its changes back, and applies them again when it goes on. All ranks start with the controller's
attributes.

Comparing all attributes at each turn would take longer than a collective. CPython numbers the versions of a class and,
up to Python 3.12, of a dict (``versions.py``). A turn compares these numbers. Where Python has none, ranks share such
changes.

Watched are ``torch.Tensor``, some modules of torch, and all layers except those that a function has made. Of layers
that are not torch's, only the methods are watched, because their other attributes are globals like any other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress, repeat
from operator import is_not, ne
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.compat.python.interpreter import ABC_IMPL
from pdlcheck.worlds.simulated.process_state import versions
from pdlcheck.worlds.simulated.process_state.protocol import ProcessState, Rank

__all__ = ["Patches", "TorchPatches"]

_MODULES: tuple[ModuleType, ...] = (torch, nn.functional, nn.init, dist)
_ABSENT: Any = object()
_METHODS = (FunctionType, classmethod, staticmethod, property)
# names that Python makes itself, or whose values ranks keep in another way
_PYTHONS = frozenset({
    *("__abstractmethods__", "__annotate__", "__annotations__", "__dict__", "__doc__", "__firstlineno__"),
    *("__static_attributes__", "__warningregistry__", "__weakref__", ABC_IMPL.attribute),
})  # fmt: skip


class _Target:
    """A class or a module, with its contents while the controller runs."""

    __slots__ = ("_drop", "_number", "_put", "_seen", "_wanted", "contents", "target", "version_at")

    def __init__(self, target: Any, version_at: int) -> None:
        self.target, self.version_at = target, version_at
        self._number = versions.number_at(version_at)
        self._seen: int | None = None
        is_module = type(target) is ModuleType
        self._put: Callable[..., None] = setattr if is_module else type.__setattr__
        self._drop: Callable[..., None] = delattr if is_module else type.__delattr__
        is_torchs = target.__name__ if is_module else target.__module__
        self._wanted = object if is_torchs.partition(".")[0] == "torch" else _METHODS
        self.note()

    def note(self) -> None:
        """Record the present contents as the controller's."""
        self.contents: dict[str, Any] = dict(vars(self.target))

    def remember(self) -> None:
        """Record the present version as that of the controller's contents."""
        if self._number.value == 0:
            versions.look_up(self.target)
        self._seen = self._number.value or None

    def is_as_seen(self) -> bool:
        """Return whether the contents are certainly the controller's."""
        return self._number.value == self._seen

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
        # without a loop in Python, because DDP sets an attribute of its class in each forward pass
        differs = map(is_not, map(before.get, now, repeat(_ABSENT)), now.values())
        changes = {name: now[name] for name in compress(now, differs)}
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


Patches = Mapping[_Target, Mapping[str, Any]]
_NO_PATCHES: Patches = {}


class _Watched:
    """All targets, with the versions that the controller has.

    A few numbers show that something has changed. Only the targets behind the numbers that differ are looked at.
    """

    def __init__(self, targets: Iterable[_Target]) -> None:
        by_target = {one.target: one for one in targets}
        torchs = [one for one in by_target if type(one) is not ModuleType and one.__module__.startswith("torch.")]
        # DDP sets an attribute of its class in each forward pass, and must not put other classes under suspicion
        joint, joined = versions.joint_subclasses([o for o in torchs if not issubclass(o, DistributedDataParallel)])
        alone = [one for one in by_target.values() if one.target not in joined]
        self._shown = [(one, [by_target[base] for base in one.__mro__ if base in joined]) for one in joint]
        self._shown += [(one.target, [one]) for one in alone]
        self._numbers = versions.Numbers([*map(versions.of_class, joint), *(one.version_at for one in alone)])
        self._seen: tuple[int | None, ...] = (None,) * len(self._shown)
        self.remember()

    def remember(self) -> None:
        """Record the versions of all targets while they hold the controller's contents."""
        for shown, targets in self._different():
            versions.look_up(shown)
            for one in targets:
                one.remember()
        self._seen = _known(self._numbers.read())

    def is_as_seen(self) -> bool:
        """Return whether no target has changed. This runs at each turn."""
        return self._numbers.read() == self._seen

    def changed(self) -> list[_Target]:
        """Return the targets whose contents may have changed, those without a number among them."""
        return [one for _, targets in self._different() for one in targets if not one.is_as_seen()]

    def _different(self) -> Iterator[tuple[Any, list[_Target]]]:
        return compress(self._shown, map(ne, self._numbers.read(), self._seen))


def _known(numbers: tuple[int, ...]) -> tuple[int | None, ...]:
    """Return the numbers with None for 0: from Python 3.13 on, a class gets no number after 1000 changes."""
    return tuple(number or None for number in numbers) if 0 in numbers else numbers


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
    if versions.IN_CLASS is not None:
        for one in _classes():
            yield _Target(one, versions.of_class(one))
    if versions.IN_DICT is not None:
        for module in _MODULES:
            yield _Target(module, id(vars(module)) + versions.IN_DICT)


def _classes() -> Iterator[type]:
    """Yield tensors and layers, except layers that a function has made: those may end before the process does."""
    yield torch.Tensor
    todo, seen = [nn.Module, nn.Parameter], set()
    while todo:
        one = todo.pop()
        if one not in seen:
            seen.add(one)
            todo += type.__subclasses__(one)
            if "<locals>" not in one.__qualname__ and one.__module__ != versions.__name__:
                yield one
