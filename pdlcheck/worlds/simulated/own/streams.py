"""The stream of Python's module ``random``, whose state its own functions hand out number by number.

That takes longer than all else that a turn needs. Where the interpreter keeps the state as CPython does, which is tried
out when this module is imported, its bytes are copied instead.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

__all__ = ["is_laid_out_as_known", "python_stream", "set_python_stream"]

_NUMBERS = 624
_stream: Any = getattr(random, "_inst", None)  # whose methods the functions of the module are


class _Layout(ctypes.Structure):
    """Of what follows the head of a ``random.Random`` object."""

    _fields_ = (("index", ctypes.c_int), ("numbers", ctypes.c_uint32 * _NUMBERS))


class _Mark(ctypes.Structure):
    """What two states have in common only if all else is the same, too: the first number of a seed is always one."""

    _fields_ = (("index", ctypes.c_int), ("first", ctypes.c_uint32), ("following", ctypes.c_uint64))


def is_laid_out_as_known(stream: Any) -> bool:
    """Do the bytes of a ``random.Random`` lie where CPython has them?"""
    if type(stream) is not random.Random or random.Random.__basicsize__ < object.__basicsize__ + ctypes.sizeof(_Layout):
        return False
    state = stream.getstate()[1]
    there = _Layout.from_address(id(stream) + object.__basicsize__)
    return bool((*there.numbers, there.index) == state)


if is_laid_out_as_known(_stream):
    _where, _size = id(_stream) + object.__basicsize__, ctypes.sizeof(_Layout)
    _mark = _Mark.from_address(_where)

    def python_stream(last: Any = None) -> Any:
        """Return the state of the stream, for :func:`set_python_stream`; ``last`` itself if it is still that."""
        mark = _mark.index, _mark.following, _stream.gauss_next
        return last if last is not None and last[0] == mark else (mark, ctypes.string_at(_where, _size))

    def set_python_stream(state: Any) -> None:
        """Put the stream where it was."""
        ctypes.memmove(_where, state[1], _size)
        _stream.gauss_next = state[0][2]

else:

    def python_stream(last: Any = None) -> Any:
        """Return the state of the stream, for :func:`set_python_stream`."""
        return random.getstate()

    set_python_stream = random.setstate
