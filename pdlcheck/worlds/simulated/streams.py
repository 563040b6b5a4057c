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


def is_laid_out_as_known(stream: Any) -> bool:
    """Do the bytes of a ``random.Random`` lie where CPython has them?"""
    if type(stream) is not random.Random or random.Random.__basicsize__ < object.__basicsize__ + ctypes.sizeof(_Layout):
        return False
    state = stream.getstate()[1]
    there = _Layout.from_address(id(stream) + object.__basicsize__)
    return bool((*there.numbers, there.index) == state)


if is_laid_out_as_known(_stream):
    _where, _size = id(_stream) + object.__basicsize__, ctypes.sizeof(_Layout)

    def python_stream() -> Any:
        """Return the state of the stream, for :func:`set_python_stream`."""
        return ctypes.string_at(_where, _size), _stream.gauss_next

    def set_python_stream(state: Any) -> None:
        """Put the stream where it was."""
        ctypes.memmove(_where, state[0], _size)
        _stream.gauss_next = state[1]

else:
    python_stream, set_python_stream = random.getstate, random.setstate
