"""State that torch's context managers and global hooks keep for the whole process: each rank has its own.

``loss_parallel`` puts its operators into the table of all DTensors. ``enable_wrap`` and FSDP's profiler refuse to be
entered twice. ``CommDebugMode`` and ``FlopCounterMode`` record every module's call. A rank that communicates inside one
of them gives up its turn there. What a rank leaves behind when it ends applies to every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import is_not
from typing import Any, NamedTuple

from pdlcheck.compat.python.imports import is_initializing
from pdlcheck.compat.torch.globals import CONTEXTS, HOOKS, TorchGlobal
from pdlcheck.worlds.simulated.process_state.protocol import Rank, RunState

__all__ = ["TorchGlobals"]


class _Place(NamedTuple):
    """An attribute, or the contents of a container.

    The container stays the same object, because handles and C++ hold references to it.
    """

    owner: Any
    name: str
    contents: bool
    only_grows: bool

    def read(self) -> Any:
        value = getattr(self.owner, self.name)
        return value.copy() if self.contents else value

    def same_as(self, held: Any) -> bool:
        value = getattr(self.owner, self.name)
        if self.contents:
            return len(value) == len(held) and (not value or bool(value == held))
        return value is held

    def put(self, held: Any) -> None:
        if self.contents:
            value = getattr(self.owner, self.name)
            value.clear()
            value.update(held)
        else:
            setattr(self.owner, self.name, held)


class TorchGlobals(RunState):
    """The values of ``HOOKS`` and ``CONTEXTS``. Ranks start from those that the controller has, or that a rank left."""

    start: tuple[Any, ...] = ()  # may be shorter than the list of places

    def __init__(self) -> None:
        # those whose modules are not imported yet, because that takes seconds
        self._missing: list[TorchGlobal] = [*HOOKS, *CONTEXTS]
        self._places: list[_Place] = []
        self._modules = 0  # the number of imported modules at the last search
        self._present: tuple[Any, ...] = ()
        # These lists allow a quick test, at every switch, of whether `_present` has changed: empty containers,
        # containers with their contents, containers with only their length, and attributes.
        self._empty: list[Any] = []
        self._filled: list[tuple[Any, Any]] = []
        self._counted: list[tuple[Any, int]] = []
        self._owners: list[Any] = []
        self._names: list[str] = []
        self._values: list[Any] = []

    def capture(self) -> tuple[Any, ...]:
        """Return the values in force, and put those in force that all ranks start from.

        The object stays the same as long as nothing changes.
        """
        present = self._read()
        if present is not self.start:
            self.apply(self.start)
        return present

    def apply(self, state: tuple[Any, ...]) -> None:
        """Put ``state`` in force, which may be older than some of the places: those get the values of the start."""
        if state is self._present:
            return
        state += self.start[len(state) :]
        for place, held in zip(self._places, state, strict=True):
            if not place.same_as(held):
                place.put(held)
        self._record(state)

    def baseline(self) -> Callable[[], object] | None:
        """Let ranks start from the values in force now. Ranks undo their own, so nothing is left to restore."""
        self.start = self._read()
        return None

    def begin(self, rank: Rank, kept: Any) -> tuple[Any, ...]:
        """Return the values that the rank starts from."""
        return self.start

    def end(self, rank: Rank, kept: tuple[Any, ...]) -> None:
        """Share the values that a rank has not restored when it ended, as torch would without this module."""
        left = self._read()
        if left != kept + self.start[len(kept) :]:
            self.start = left
        else:
            self.apply(self.start)  # another rank may have left other values meanwhile

    def _read(self) -> tuple[Any, ...]:
        if len(sys.modules) != self._modules and self._missing:
            self._look()
        if self._has_changed():
            self._record(tuple([place.read() for place in self._places]))
        return self._present

    def _record(self, held: tuple[Any, ...]) -> None:
        """Record ``held`` as the values in force."""
        self._present = held
        for found in (self._empty, self._filled, self._counted, self._owners, self._names, self._values):
            found.clear()
        for place, value in zip(self._places, held, strict=True):
            container = getattr(place.owner, place.name) if place.contents else None
            if container is None:
                self._owners.append(place.owner)
                self._names.append(place.name)
                self._values.append(value)
            elif not value:
                self._empty.append(container)
            elif place.only_grows:
                self._counted.append((container, len(value)))
            else:
                self._filled.append((container, value))

    def _has_changed(self) -> bool:
        if any(self._empty) or any(map(is_not, map(getattr, self._owners, self._names), self._values)):
            return True
        for container, count in self._counted:
            if len(container) != count:
                return True
        return any(container != value for container, value in self._filled) if self._filled else False

    def _look(self) -> None:
        """Find the places in modules that were imported meanwhile.

        A rank may already be inside one of their context managers.
        """
        found = self._present
        self._modules = len(sys.modules)
        for known in self._missing[:]:
            owner: Any = sys.modules.get(known.module)
            if owner is None or is_initializing(owner):
                continue
            self._missing.remove(known)
            for part in filter(None, known.owner.split(".")):
                owner = getattr(owner, part, None)
            if hasattr(owner, known.attribute):  # not every version of torch has it
                contents = isinstance(getattr(owner, known.attribute), dict | set) and not known.is_assigned
                place = _Place(owner, known.attribute, contents, known.only_grows)
                held = place.read()
                self.start += (known.at_rest(held),)
                found += (held,)
                self._places.append(place)
        self._record(found)
