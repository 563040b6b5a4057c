"""The normal number that ``numpy.random`` keeps for the next call: it draws two at a time.

It belongs to the stream, but not to the bit generator: another bit generator drops it. Asking numpy for it copies the
whole stream, which takes longer than all else that a turn needs. Where it lies in the object is looked for when this
module is imported; then its bytes are copied instead.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

__all__ = ["kept_normal", "place_of_kept_normal", "set_kept_normal"]

_MARK = 0.7432908174306051  # to be found among the bytes of an object
_SIZE = 16  # an int that says whether there is one, padding, and the number
_stream: Any = getattr(np.random.mtrand, "_rand", None)  # whose methods the functions of the module are


def place_of_kept_normal(stream: Any) -> int | None:
    """How many bytes into a ``numpy.random.RandomState`` its number lies; None where nothing looks like it."""
    if type(stream) is not np.random.RandomState:
        return None
    probe = np.random.RandomState(1)

    def held(has_one: int) -> bytes:
        probe.set_state({**probe.get_state(legacy=False), "has_gauss": has_one, "gauss": _MARK})
        return ctypes.string_at(id(probe), np.random.RandomState.__basicsize__)

    place = held(1).find(struct.pack("d", _MARK)) - 8
    is_flag = place >= 0 and all(struct.unpack_from("i", held(has_one), place)[0] == has_one for has_one in (0, 1))
    return place if is_flag else None


_place = place_of_kept_normal(_stream)
if _place is not None:
    _where = id(_stream) + _place

    def kept_normal() -> Any:
        """Return what is kept, for :func:`set_kept_normal`."""
        return ctypes.string_at(_where, _SIZE)

    def set_kept_normal(state: Any) -> None:
        """Keep it again, whichever the bit generator is now."""
        ctypes.memmove(_where, state, _SIZE)

else:

    def kept_normal() -> Any:
        """Return what is kept, for :func:`set_kept_normal`."""
        stream: Any = np.random.get_state()
        return stream[3:]

    def set_kept_normal(state: Any) -> None:
        """Keep it again, whichever the bit generator is now."""
        stream: Any = np.random.get_state()
        np.random.set_state((*stream[:3], *state))
