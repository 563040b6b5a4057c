"""Slightly damaged bytes: members of a corpus with a few edits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

__all__ = ["edits", "mutated"]

_NUMBERS = [b"0", b"-1", b"1", b"3", b"127", b"65536", b"2147483647", b"2147483648", b"9223372036854775807"]
_NUMBERS += [b"9223372036854775808", b"18446744073709551616", b"1" * 400, b"1e308", b"1e309"]
_NUMBERS += [b"-0.0", b"nan", b"inf", b""]
_INTEGERS = [0, 1, 2, 127, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
_BINARY = [
    (number % 2 ** (8 * size)).to_bytes(size, order)  # type: ignore[arg-type]
    for number in _INTEGERS
    for size in (1, 2, 4, 8)
    for order in ("little", "big")
]
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")

Edit = tuple[Any, ...]


def mutated(corpus: Sequence[bytes], words: Sequence[bytes] = ()) -> st.SearchStrategy[bytes]:
    """Draw a member of ``corpus``, perhaps edited; ``words`` are byte strings with a meaning in the format."""
    return st.builds(_edited, st.sampled_from(corpus), edits(corpus, words))


def edits(corpus: Sequence[bytes], words: Sequence[bytes] = ()) -> st.SearchStrategy[list[Edit]]:
    place = st.integers(0, 2**12)
    piece = st.sampled_from(_BINARY) | st.binary(min_size=1, max_size=8)
    kinds = [
        st.tuples(st.just("set"), place, piece),
        st.tuples(st.just("insert"), place, piece | st.sampled_from([*words, b"\n"])),
        st.tuples(st.just("number"), place, st.sampled_from(_NUMBERS)),
        st.tuples(st.just("cut"), place, st.integers(1, 64)),
        st.tuples(st.just("repeat"), place, st.integers(1, 32), st.integers(2, 200)),
        st.tuples(st.just("splice"), place, st.sampled_from(corpus), place),
        st.tuples(st.just("end"), place),
    ]
    return st.lists(st.one_of(kinds), max_size=5)


def _edited(data: bytes, steps: Sequence[Edit]) -> bytes:
    for kind, where, *how in steps:
        at = where % (len(data) + 1)
        match kind:
            case "set":
                data = data[:at] + how[0] + data[at + len(how[0]) :]
            case "insert":
                data = data[:at] + how[0] + data[at:]
            case "number":
                found = list(_NUMBER.finditer(data))
                if found:
                    one = found[where % len(found)]
                    data = data[: one.start()] + how[0] + data[one.end() :]
            case "cut":
                data = data[:at] + data[at + how[0] :]
            case "repeat":
                data = data[:at] + data[at : at + how[0]] * how[1] + data[at + how[0] :]
            case "splice":
                data = data[:at] + how[0][how[1] % (len(how[0]) + 1) :]
            case "end":
                data = data[:at]
    return data
