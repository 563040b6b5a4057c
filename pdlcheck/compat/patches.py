"""Stand-ins for attributes of Python, torch and pytest, in force for a while and taken back afterwards."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any, Final, NamedTuple

from pdlcheck.compat.python.imports import is_initializing

__all__ = ["ABSENT", "Patch", "Patches"]

ABSENT: Final[Any] = object()  # the value of an attribute that is not there


class Patch(NamedTuple):
    """One attribute and its stand-in.

    Args:
        owner: a module, a class or an object; the name of a module, if a program may never import it.
        name: the attribute.
        make: returns the stand-in, given the real value (``ABSENT`` without one). It may return the real value: then
            nothing is exchanged.
        why: the reason, for people who read the table.
        everywhere: exchange the value in each module that has imported it by name, such as a test file. The module
            that defines the stand-in keeps its names.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]
    why: str
    everywhere: bool = False


class _Attribute:
    """A row of the table, and what it exchanges."""

    __slots__ = ("_own", "_values", "in_force", "ours", "owner", "real", "row")

    def __init__(self, row: Patch) -> None:
        self.row = row
        self.owner = None if isinstance(row.owner, str) else row.owner
        self._values = _values_of(self.owner)
        self._own = self.real = self.ours = ABSENT  # own: in the values of the owner itself, ABSENT if it inherits it
        self.in_force = False

    def put(self) -> bool:
        """Put the stand-in into its place; return whether that changed anything."""
        if self.owner is None and not self._is_imported():
            return False
        name = self.row.name
        own = self._values.get(name, ABSENT)
        if self.in_force and own is not self._own:  # ours is there, or a value of the program
            return False
        if self.ours is ABSENT or (own is not self._own and own is not self.ours):
            self._own, self.real = own, getattr(self.owner, name, ABSENT)
            self.ours = self.row.make(self.real)
        if self.ours is self.real:
            return False
        setattr(self.owner, name, self.ours)
        self.in_force = True
        return True

    def take_back(self) -> bool:
        """Put the real value back; return whether that changed anything."""
        was_in_force, self.in_force = self.in_force, False
        if not was_in_force or self._values.get(self.row.name, ABSENT) is not self.ours:
            return False
        if self._own is ABSENT:
            delattr(self.owner, self.row.name)
        else:
            setattr(self.owner, self.row.name, self._own)
        return True

    def _is_imported(self) -> bool:
        self.owner = sys.modules.get(self.row.owner)
        self._values = _values_of(self.owner)
        return self.owner is not None


class _AnyAttributes:
    """The values of an object that is neither a module nor a class."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def get(self, name: str, default: Any) -> Any:
        return getattr(self._owner, name, default)


def _values_of(owner: Any) -> Any:
    return owner.__dict__ if isinstance(owner, type | ModuleType) else _AnyAttributes(owner)


class Patches:
    """A table of patches, in force inside of a ``with`` block, which may be entered again inside of itself.

    A value that a program puts in the place of a stand-in stays there after the block. A program that reads a stand-in
    inside of the block, and puts it back afterwards, does no harm: the next block takes it back.

    Args:
        rows: the table.
        keep: the patches stay in force after the block, until :meth:`take_back`. Python has to look up the attributes
            of a changed class anew, so a block of a millisecond should not change classes twice.

    Example:
        >>> import math
        >>> with Patches([Patch(math, "tau", lambda real: real / 2, "half of it is enough")]):
        ...     round(math.tau, 2)
        3.14
        >>> round(math.tau, 2)
        6.28
    """

    def __init__(self, rows: Iterable[Patch], *, keep: bool = False) -> None:
        self._attributes = [_Attribute(row) for row in rows]
        self._keep = keep
        self._depth = 0
        self._is_in_force = False
        self._lock = threading.RLock()
        self._importers = _Importers()

    def __enter__(self) -> Patches:
        with self._lock:
            self._depth += 1
            if self._depth == 1:  # also if the table was kept: a program may have put a real value back
                self._is_in_force = True
                self._put()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._depth -= 1
            if not self._keep:
                self.take_back()

    @property
    def rows(self) -> list[Patch]:
        """The table, without its state."""
        return [one.row for one in self._attributes]

    def put_for_good(self) -> None:
        """Put the patches and leave them, in a process that belongs to a rank."""
        self.__enter__()

    def add(self, *rows: Patch) -> None:
        """Add rows that are not in the table yet; inside of the block they are in force at once."""
        known = self.rows
        self._attributes += [_Attribute(row) for row in rows if row not in known]
        self.put_late()

    def stand_in(self, value: Any) -> Any:
        """Return what takes the place of ``value`` now; itself if nothing does."""
        return next((one.ours for one in self._attributes if one.in_force and one.real is value), value)

    def put_late(self) -> None:
        """If the table is in force, put the rows of modules that have been imported since."""
        with self._lock:
            if self._is_in_force:
                self._put()

    def take_back(self) -> None:
        """Put the real values back, unless a block is open."""
        with self._lock:
            if self._depth or not self._is_in_force:
                return
            self._is_in_force = False
            changed = [one for one in reversed(self._attributes) if one.take_back()]
            self._importers.exchange([(one.ours, one.real, _home(one)) for one in changed if one.row.everywhere])

    def _put(self) -> None:
        changed = [one for one in self._attributes if one.put()]
        self._importers.exchange([(one.real, one.ours, _home(one)) for one in changed if one.row.everywhere])


class _Importers:
    """The modules that have imported a value by name.

    A look at every name of every module takes milliseconds. It is repeated only where a module has been imported since,
    or one that was half imported has grown.
    """

    def __init__(self) -> None:
        self._found: list[tuple[ModuleType, str]] = []
        self._growing: list[ModuleType] = []
        self._state: tuple[object, ...] = ()

    def exchange(self, pairs: Sequence[tuple[Any, Any, Any]]) -> None:
        """Give each name that holds the first value of a pair the second one, except in the module with these globals.

        Args:
            pairs: the present value, the new one, and the globals of the module that defines the stand-in.
        """
        if not pairs:
            return
        by_id = {id(pair[0]): pair for pair in pairs}  # the ids are those of values that the pairs keep alive
        if self._state != self._present_state():
            self._look(by_id)
        for module, name in self._found:
            pair = by_id.get(id(vars(module).get(name)))
            if pair is not None:
                setattr(module, name, pair[1])

    def _look(self, by_id: Mapping[int, tuple[Any, Any, Any]]) -> None:
        modules = [one for one in list(sys.modules.values()) if isinstance(one, ModuleType)]
        self._growing = [one for one in modules if _is_growing(one)]
        self._found = [
            (one, name)
            for one in modules
            for name, held in list(vars(one).items())
            if id(held) in by_id and vars(one) is not by_id[id(held)][2]
        ]
        self._state = self._present_state()

    def _present_state(self) -> tuple[object, ...]:
        last = next(reversed(sys.modules.values()))  # a module that is imported once more is another object
        return len(sys.modules), last, *(len(vars(one)) for one in self._growing)


def _home(attribute: _Attribute) -> Any:
    """Return the globals of the module that defines a function; ``wraps`` makes ``__module__`` that of the real one."""
    return getattr(attribute.ours, "__globals__", None)


def _is_growing(module: ModuleType) -> bool:
    return module.__name__ == "__main__" or is_initializing(module)
