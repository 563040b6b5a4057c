"""The numbers by which CPython marks the versions of classes, and of dicts up to Python 3.12.

The number of a class is 0 after a change, and another one after the next look-up of an attribute. The numbers are in
the memory of the objects, at a place that is found by experiment.

The numbers of hundreds of classes lie on as many pages of memory, and reading them all takes longer than a switch
between ranks. But a change of a class also resets the numbers of its subclasses. So one class that inherits from many
others, a joint subclass, shows by its own number whether any of them has changed.
"""

from __future__ import annotations

import ctypes
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

from torch import nn

from pdlcheck.compat.python.interpreter import gil_is_enabled

__all__ = ["IN_CLASS", "IN_DICT", "Numbers", "joint_subclasses", "look_up", "number_at", "of_class"]

_WORD = 4  # bytes
_JOINED = 32  # classes: the time to make a joint subclass grows with the square of them


class Numbers:
    """The numbers at some addresses.

    Args:
        addresses: where they are; at least two.
    """

    def __init__(self, addresses: Sequence[int]) -> None:
        start = min(addresses)
        count = (max(addresses) - start) // _WORD + 1
        # read only at these places, because the memory between them may not exist
        self._memory = memoryview((ctypes.c_uint32 * count).from_address(start)).cast("B").cast("I")
        self._read = itemgetter(*((address - start) // _WORD for address in addresses))

    def read(self) -> tuple[int, ...]:
        """Return the numbers."""
        return self._read(self._memory)  # type: ignore[no-any-return]  # two or more: a tuple


def number_at(address: int) -> ctypes.c_uint32:
    """Return the number at an address; its ``value`` is always the present one."""
    return ctypes.c_uint32.from_address(address)


def of_class(one: type) -> int:
    """Return the address of the number of a class."""
    assert IN_CLASS is not None
    return id(one) + IN_CLASS


def look_up(target: Any) -> None:
    """Look up an attribute, so that Python gives a changed class, and all its bases, new numbers."""
    getattr(target, "__init__", None)


class _Alone:
    """The base of a joint subclass before it has its bases: setting them later calls no ``__init_subclass__``."""


_joint: dict[frozenset[type], type] = {}  # by the classes that it inherits from directly


def joint_subclasses(classes: Iterable[type]) -> tuple[list[type], set[type]]:
    """Return classes that inherit from as many of ``classes`` as Python permits, and the set of those.

    They stay among the subclasses of their bases until the next call, and have no other effect.
    """
    metaclasses, size = (type, ABCMeta), nn.Module.__basicsize__
    wanted = {one for one in classes if type(one) in metaclasses and one.__basicsize__ == size}
    leaves = sorted((one for one in wanted if wanted.isdisjoint(type.__subclasses__(one))), key=_name)
    groups = [leaves[start : start + _JOINED] for start in range(0, len(leaves), _JOINED)]
    made = {}
    while groups:
        bases = groups.pop()
        one = _joint.get(frozenset(bases)) or _subclass(bases)
        if one is not None:
            made[frozenset(bases)] = one
        elif half := len(bases) // 2:
            groups += [bases[:half], bases[half:]]
    for key in _joint.keys() - made.keys():
        _joint[key].__bases__ = (_Alone,)
    _joint.clear()
    _joint.update(made)
    return [*made.values()], wanted & {base for one in made.values() for base in one.__mro__}


def _subclass(bases: Sequence[type]) -> type | None:
    """Return a class that inherits from all of these; None if the orders of their own bases conflict."""
    metaclass = ABCMeta if ABCMeta in map(type, bases) else type
    one = metaclass("Joint", (_Alone,), {"__module__": __name__})
    try:
        one.__bases__ = tuple(bases)
    except TypeError:
        return None
    return one


def _name(one: type) -> tuple[str, str]:
    return one.__module__, one.__qualname__


def _place_of_number(held: object, kind: type, change: Callable[[], object], use: Callable[[], object]) -> int | None:
    """Return the offset of an object's number: the one word that each change changes; None if it is not found."""
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


def _place_in_class() -> int | None:
    class Probe:
        number = 0

    def change() -> None:
        Probe.number += 1

    place = _place_of_number(Probe, type, change, lambda: getattr(Probe, "number"))  # noqa: B009 - a look-up
    if place is None:
        return None
    change()
    return place if _words(Probe, type)[place // _WORD] == 0 else None


def _place_in_dict() -> int | None:
    probe = {"number": 0}

    def change() -> None:
        probe["number"] += 1

    return _place_of_number(probe, dict, change, lambda: None)


_is_known = sys.implementation.name == "cpython" and gil_is_enabled()
IN_CLASS = _place_in_class() if _is_known else None
IN_DICT = _place_in_dict() if _is_known else None
