"""The way from checks to a test framework: which conditions the run of a passed check has met."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

__all__ = ["Listener", "listening", "publish"]

Listener = Callable[[str, Mapping[str, bool]], object]

_listeners: list[Listener] = []


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call ``listener`` with the name of each check that passes in the block, and its conditions.

    The value of a condition is True if the run met it. A check without a listener reports to no one, so it can be used
    in any program.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def publish(check: str, conditions: Mapping[str, bool]) -> None:
    """Report the conditions of a check that has passed to the innermost block."""
    if _listeners:
        _listeners[-1](check, conditions)
