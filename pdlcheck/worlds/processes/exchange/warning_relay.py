"""Warnings of ranks: the controller's filters hold in the ranks, and its recorders get the ranks' warnings.

So ``-W error``, ``filterwarnings``, ``pytest.warns`` and ``recwarn`` mean the same on processes and on simulated ranks.
Without a recorder, a rank writes its warnings to its stderr, as any process does. So does a rank whose function fails.
The recorded warnings of a rank that dies are lost.
"""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from pdlcheck.compat.python.warnings import records_warnings

__all__ = ["WarningFilters", "present_filters", "recording_warnings", "replay_warnings"]

WarningFilters = tuple[bytes, bool]  # the controller's filters, and whether its warnings are recorded

_sent: tuple[Sequence[Any], bytes] = (), b""
_received: tuple[bytes, list[Any]] = b"", []
_registries: dict[str, dict[Any, Any]] = {}  # the registries of shown warnings, by file


def present_filters() -> WarningFilters:
    """Return the controller's present filters, and whether its warnings are recorded."""
    global _sent
    if warnings.filters != _sent[0]:
        _sent = list(warnings.filters), pickle.dumps([data for one in warnings.filters if (data := _dumped(one))])
    return _sent[1], records_warnings()


@contextmanager
def recording_warnings(filters: WarningFilters | None) -> Iterator[Callable[[], bytes]]:
    """Apply ``filters`` around the user's function in a rank.

    Yields:
        A function that returns the recorded warnings as bytes for :func:`replay_warnings`; empty if there are none.
    """
    if filters is None:
        yield bytes
        return
    data, records = filters
    recorded: list[warnings.WarningMessage] | None = None
    failed = True
    try:
        with warnings.catch_warnings(record=records) as recorded:
            warnings.resetwarnings()  # makes Python forget which warnings it has shown
            warnings.filters[:] = _filters(data)  # type: ignore[index]  # a list, in catch_warnings
            yield lambda: _packed(recorded or [])
            failed = False
    finally:
        if failed and recorded:
            for one in recorded:
                warnings.showwarning(one.message, one.category, one.filename, one.lineno)


def replay_warnings(heard: Sequence[bytes]) -> None:
    """Issue the ranks' warnings in the controller, as often as its filters show equal ones."""
    for data in heard:
        for one in pickle.loads(data) if data else ():
            try:
                message, filename, lineno = pickle.loads(one)
            except Exception:  # its class cannot be imported or unpickled
                continue
            registry = _registries.setdefault(filename, {})
            try:
                warnings.warn_explicit(message, type(message), filename, lineno, registry=registry)
            except Warning:  # the function has its own filters, by which it is no error
                warnings.showwarning(message, type(message), filename, lineno)


def _packed(heard: Sequence[warnings.WarningMessage]) -> bytes:
    """Return the warnings as bytes; empty if there are none."""
    return pickle.dumps([_dumped_message(one) for one in heard]) if heard else b""


def _dumped_message(one: warnings.WarningMessage) -> bytes:
    place = one.filename, one.lineno
    data = _dumped((one.message, *place))
    return data or pickle.dumps((Warning(f"{one.category.__name__}: {one.message}"), *place))


def _dumped(value: Any) -> bytes:
    """Return the value as bytes; empty if it cannot be pickled."""
    try:
        data: bytes = cloudpickle.dumps(value)
        return data
    except Exception:  # pickling runs code of any class
        return b""


def _filters(data: bytes) -> list[Any]:
    global _received
    if data != _received[0]:
        _received = data, [one for part in pickle.loads(data) if (one := _filter(part))]
    return _received[1]


def _filter(data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:  # a rank that cannot import a category cannot issue its warnings
        print(f"pdlcheck: a filter of warnings is left out: {type(error).__name__}: {error}", file=sys.stderr)
        return None
