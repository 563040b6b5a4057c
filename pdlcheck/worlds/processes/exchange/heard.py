"""Warnings of ranks: what the controller's filters say holds there, and who records in the controller hears them.

So ``-W error``, ``filterwarnings``, ``pytest.warns`` and ``recwarn`` mean on processes what they mean on simulated
ranks. Where nobody records, a rank writes its warnings to its stderr, as any process; so does one whose function fails.
What a rank has recorded that dies is lost.
"""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

__all__ = ["Ears", "hearing", "present_ears", "tell"]

Ears = tuple[bytes, bool]  # the filters of the controller, and whether somebody records

_warnings = vars(warnings)  # ``_showwarnmsg_impl``, by which catch_warnings records, has no public name
_sent: tuple[Sequence[Any], bytes] = (), b""
_received: tuple[bytes, list[Any]] = b"", []
_registries: dict[str, dict[Any, Any]] = {}  # of warnings that were shown, by file


def present_ears() -> Ears:
    """What holds in the controller now."""
    global _sent
    if warnings.filters != _sent[0]:
        _sent = list(warnings.filters), pickle.dumps([data for one in warnings.filters if (data := _dumped(one))])
    recorded = not isinstance(_warnings["_showwarnmsg_impl"], FunctionType)  # but the method of a list
    return _sent[1], recorded or warnings.showwarning is not _warnings.get("_showwarning_orig")


@contextmanager
def hearing(ears: Ears | None) -> Iterator[Callable[[], bytes]]:
    """In a rank, around the user's function: gives what returns what was warned of, for :func:`tell`."""
    if ears is None:
        yield bytes
        return
    data, records = ears
    recorded: list[warnings.WarningMessage] | None = None
    failed = True
    try:
        with warnings.catch_warnings(record=records) as recorded:
            warnings.resetwarnings()  # Python forgets what it has shown
            warnings.filters[:] = _filters(data)  # type: ignore[index]  # a list, in catch_warnings
            yield lambda: _packed(recorded or [])
            failed = False
    finally:
        if failed and recorded:
            for one in recorded:
                warnings.showwarning(one.message, one.category, one.filename, one.lineno)


def tell(heard: Sequence[bytes]) -> None:
    """In the controller: warn of what ranks were warned of, as often as its filters show equal ones."""
    for data in heard:
        for one in pickle.loads(data) if data else ():
            try:
                message, filename, lineno = pickle.loads(one)
            except Exception:  # its class is not there, or refuses
                continue
            registry = _registries.setdefault(filename, {})
            try:
                warnings.warn_explicit(message, type(message), filename, lineno, registry=registry)
            except Warning:  # the function has filters of its own, by which it is no error
                warnings.showwarning(message, type(message), filename, lineno)


def _packed(heard: Sequence[warnings.WarningMessage]) -> bytes:
    """Empty if nothing was heard."""
    return pickle.dumps([_dumped_message(one) for one in heard]) if heard else b""


def _dumped_message(one: warnings.WarningMessage) -> bytes:
    place = one.filename, one.lineno
    data = _dumped((one.message, *place))
    return data or pickle.dumps((Warning(f"{one.category.__name__}: {one.message}"), *place))


def _dumped(value: Any) -> bytes:
    """Empty if it cannot travel."""
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
    except Exception as error:  # of a category that no rank can import none can be warned of
        print(f"pdlcheck: a filter of warnings is left out: {type(error).__name__}: {error}", file=sys.stderr)
        return None
