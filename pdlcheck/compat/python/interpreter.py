"""The private names of classes and of the interpreter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

from pdlcheck.compat.private import name

__all__ = [
    "ABC_IMPL",
    "gil_is_enabled",
]

ABC_IMPL: Final = name(
    "abc.ABC._abc_impl",
    "the difference between attributes that Python makes itself and patches of a class",
    lost="an abstract class that a simulated rank uses counts as patched",
)


def gil_is_enabled() -> bool:
    """Return whether this Python has a global interpreter lock, as all have before Python 3.13."""
    is_enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)  # documented, so not private
    return is_enabled()
