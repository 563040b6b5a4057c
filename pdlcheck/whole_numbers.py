"""A number on a command line that counts something."""

from __future__ import annotations

import argparse

__all__ = ["whole_number"]


def whole_number(text: str) -> int:
    """Return the number that a text is, for ``type`` of an argument.

    Raises:
        argparse.ArgumentTypeError: it is none, or below 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1; got {text!r}")
    return int(text)
