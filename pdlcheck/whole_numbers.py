"""The parser of a positive whole number on a command line."""

from __future__ import annotations

import argparse

__all__ = ["whole_number"]


def whole_number(text: str) -> int:
    """Return the whole number in ``text``, for ``type=`` of an argument.

    Raises:
        argparse.ArgumentTypeError: ``text`` is not a whole number, or it is below 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1; got {text!r}")
    return int(text)
