"""The normal number that ``numpy.random`` keeps for its next call, because it draws two at a time.

The number belongs to the stream but not to the bit generator: setting another bit generator drops it. numpy returns it
only with a copy of the whole stream, which takes longer than everything else in a turn. This module finds the place of
the number in the object when it is imported. It then copies the bytes instead.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

__all__ = ["cached_gauss", "place_of_kept_normal", "set_cached_gauss"]

_MARK = 0.7432908174306051  # a number to look for among the bytes of an object
_SIZE = 16  # bytes: an int that is 1 if there is a number, padding, and the number
_stream: Any = getattr(np.random.get_state, "__self__", None)  # the functions of the module are its methods


def place_of_kept_normal(stream: Any) -> int | None:
    """Return the offset in bytes of the number in a ``numpy.random.RandomState``; None if it is not found."""
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
    _bytes = (ctypes.c_char * _SIZE).from_address(id(_stream) + _place)

    def cached_gauss() -> Any:
        """Return the kept number, for :func:`set_cached_gauss`."""
        return _bytes.raw

    def set_cached_gauss(state: Any) -> None:
        """Keep the number again, whatever the bit generator is now."""
        _bytes.raw = state

else:

    def cached_gauss() -> Any:
        """Return the kept number, for :func:`set_cached_gauss`."""
        stream: Any = np.random.get_state()
        return stream[3:]

    def set_cached_gauss(state: Any) -> None:
        """Keep the number again, whatever the bit generator is now."""
        stream: Any = np.random.get_state()
        np.random.set_state((*stream[:3], *state))
