"""The random stream of Python's module ``random``.

The functions of the module return the state number by number, which takes longer than everything else in a turn. If the
interpreter keeps the state as CPython does, this module copies the bytes instead. It tests that when it is imported.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

__all__ = ["is_laid_out_as_known", "python_stream", "set_python_stream"]

_NUMBERS = 624
_stream: Any = getattr(random.getstate, "__self__", None)  # the functions of the module are its methods


class _Layout(ctypes.Structure):
    """The bytes that follow the head of a ``random.Random`` object."""

    _fields_ = (("index", ctypes.c_int), ("numbers", ctypes.c_uint32 * _NUMBERS))


class _Mark(ctypes.Structure):
    """The start of a state. Two states with the same ``index`` and ``following`` are the same state.

    The first number is left out, because it is always the same after a seed.
    """

    _fields_ = (("index", ctypes.c_int), ("first", ctypes.c_uint32), ("following", ctypes.c_uint64))


def is_laid_out_as_known(stream: Any) -> bool:
    """Return whether the bytes of a ``random.Random`` are where CPython keeps them."""
    if type(stream) is not random.Random or random.Random.__basicsize__ < object.__basicsize__ + ctypes.sizeof(_Layout):
        return False
    state = stream.getstate()[1]
    there = _Layout.from_address(id(stream) + object.__basicsize__)
    return bool((*there.numbers, there.index) == state)


if is_laid_out_as_known(_stream):
    _where = id(_stream) + object.__basicsize__
    _mark = _Mark.from_address(_where)
    _bytes = (ctypes.c_char * ctypes.sizeof(_Layout)).from_address(_where)

    def python_stream(last: Any = None) -> Any:
        """Return the state of the stream, for :func:`set_python_stream`; ``last`` itself if that is still the state."""
        mark = _mark.index, _mark.following, _stream.gauss_next
        return last if last is not None and last[0] == mark else (mark, _bytes.raw)

    def set_python_stream(state: Any) -> None:
        """Restore the state of the stream."""
        _bytes.raw = state[1]
        _stream.gauss_next = state[0][2]

else:

    def python_stream(last: Any = None) -> Any:
        """Return the state of the stream, for :func:`set_python_stream`."""
        return random.getstate()

    set_python_stream = random.setstate
