"""The fixtures ``monkeypatch``, ``caplog`` and ``capsys`` of simulated ranks, in force while their rank runs.

Each of them changes or observes state of the whole process. When its rank passes the turn, the change is undone, and
when the rank gets the turn again, it is repeated. Therefore no rank sees another rank's changes, and the order in which
ranks end does not matter.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import getattr_static, isclass, isdatadescriptor
from io import StringIO
from os import getcwd
from typing import Any, TypeVar

import pytest

from pdlcheck.compat.patches import Patch
from pdlcheck.compat.pytest import monkeypatch
from pdlcheck.compat.pytest.capture import is_captured_by, resume, suspend
from pdlcheck.compat.pytest.logging import handler_key, records_key
from pdlcheck.harness import rank_context
from pdlcheck.worlds.simulated.scheduling.rank_state import Own
from pdlcheck.worlds.simulated.scheduling.scheduler import RankThread, current_rank, running_rank

__all__ = [
    "PATCHES",
    "Captured",
    "follow_fixture",
    "follow_late_log",
    "follow_log",
    "in_force",
]

_ABSENT: Any = object()
_CHANGES = ("setattr", "delattr", "setitem", "delitem", "syspath_prepend", "chdir", "undo")  # others call these

_Own = TypeVar("_Own", bound=Own)
_HasLevel = logging.Handler | logging.Logger


def _follow(own: _Own) -> _Own:
    """Keep ``own`` in force on this rank whenever the rank runs."""
    running_rank().state.own.append(own)
    return own


@contextmanager
def in_force(own: Own) -> Iterator[None]:
    """Keep ``own`` in force on this rank in the block, whenever the rank runs."""
    owned = running_rank().state.own
    own.arrive()
    owned.append(own)
    try:
        yield
    finally:
        owned.remove(own)
        own.leave()


def follow_log(item: pytest.Item) -> None:
    """Separate the records of ``caplog`` for this rank, before its fixtures are set up."""
    if "caplog" in item.fixturenames and handler_key in item.stash:  # type: ignore[attr-defined]  # a Function
        _follow(_Log(item))


def follow_late_log(item: pytest.Item) -> None:
    """Separate the records of ``caplog`` from now on, for a rank that requested it with ``request``.

    Earlier records stay.
    """
    if handler_key in item.stash:
        _follow(_Log(item, late=True))


def follow_fixture(value: object) -> Own | None:
    """Separate the effects of a fixture's value for this rank, from now on, while its fixtures are set up."""
    if isinstance(value, pytest.MonkeyPatch):
        followed = any(isinstance(own, _Patches) and own.is_of(value) for own in running_rank().state.own)
        return None if followed else _follow(_Patches(value))
    return _follow(Captured(value)) if isinstance(value, pytest.CaptureFixture) else None


def _noted(init: Any) -> Any:
    @wraps(init)
    def follow(self: pytest.MonkeyPatch) -> None:
        init(self)
        rank = current_rank()
        if rank is not None and not rank_context.sets_up_for_all():
            rank.state.own.append(_Patches(self))

    return follow


def _on_the_ranks_own(change: Any) -> Any:
    @wraps(change)
    def changes(self: pytest.MonkeyPatch, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        rank = current_rank()
        if rank is not None and not rank_context.sets_up_for_all():
            self = _patches_of(rank, self)
        return change(self, *args, **kwargs)

    return changes


def _patches_of(rank: RankThread, patches: pytest.MonkeyPatch) -> Any:
    """Return the ``MonkeyPatch`` that this rank uses in place of ``patches``; create it on first use."""
    for own in rank.state.own:
        if isinstance(own, _Patches) and (own.is_of(patches) or own.stands_for is patches):
            return own.patches
    mine = pytest.MonkeyPatch()
    next(own for own in rank.state.own if isinstance(own, _Patches) and own.is_of(mine)).stands_for = patches
    return mine


class _Patches:
    """The patches of one ``MonkeyPatch``.

    ``stands_for`` is the controller's ``MonkeyPatch`` that this one replaces on the rank.
    """

    stands_for: pytest.MonkeyPatch | None = None

    def __init__(self, patches: pytest.MonkeyPatch) -> None:
        self.patches: Any = patches
        self._attributes: list[tuple[Any, str, Any]] = []
        self._items: list[tuple[Any, Any, Any]] = []
        self._folder: str | None = None
        self._path: list[str] | None = None

    def is_of(self, patches: pytest.MonkeyPatch) -> bool:
        """Return whether this object follows ``patches``."""
        return self.patches is patches

    def leave(self) -> None:
        """Store the patched values, and undo the patches."""
        patches = self.patches
        self._attributes = [
            (target, name, _value(target, name)) for target, name, _ in monkeypatch.changed_attributes(patches)
        ]
        items = monkeypatch.changed_items(patches)
        self._items = [(mapping, key, mapping.get(key, _ABSENT)) for mapping, key, _ in items]
        self._folder = getcwd() if monkeypatch.has_changed_folder(patches) else None
        self._path = sys.path[:] if monkeypatch.has_changed_path(patches) else None
        patches.undo()

    def arrive(self) -> None:
        """Patch the stored values again."""
        patches = self.patches
        for target, name, value in self._attributes:
            if value is _ABSENT:
                patches.delattr(target, name, raising=False)
            else:
                patches.setattr(target, name, value, raising=False)
        for mapping, key, value in self._items:
            if value is _ABSENT:
                patches.delitem(mapping, key, raising=False)
            else:
                patches.setitem(mapping, key, value)
        if self._folder is not None:
            patches.chdir(self._folder)
        if self._path is not None:
            monkeypatch.note_path(patches, sys.path[:])
            sys.path[:] = self._path


def _value(target: Any, name: str) -> Any:
    """Return the value that the target itself holds under that name, without inherited ones."""
    own = getattr(target, "__dict__", {})
    if name in own:
        return own[name]
    of_type = getattr_static(type(target), name, None)
    return getattr(target, name, _ABSENT) if not isclass(target) and isdatadescriptor(of_type) else _ABSENT


class _Log:
    """The records that ``caplog`` has captured on one rank, and the levels that the rank has set."""

    def __init__(self, item: pytest.Item, *, late: bool = False) -> None:
        self._stash = item.stash
        self._handler: Any = item.stash[handler_key]
        self._filters = list(self._handler.filters)
        self._heard: dict[str, tuple[list[logging.LogRecord], StringIO]] = {}
        self._records: dict[str, list[logging.LogRecord]] = {}
        self._set: dict[_HasLevel, int] = {}
        self._disabled: int | None = None
        if late:
            text = StringIO()
            text.write(self._handler.stream.getvalue())
            when = [*item.stash[records_key]][-1]
            self._heard[when] = [*self._handler.records], text
        self.arrive()

    def arrive(self) -> None:
        handler, everybodys = self._handler, self._stash[records_key]
        self._everybodys = everybodys, handler.records, handler.stream, handler.filters
        self._when = next(reversed(everybodys))
        handler.records, handler.stream = self._heard.get(self._when, ([], StringIO()))
        handler.filters = self._filters
        self._records[self._when] = handler.records
        self._stash[records_key] = self._records
        self._levels, self._disable = _levels(handler), logging.root.manager.disable
        for one, level in self._set.items():
            one.setLevel(level)
        if self._disabled is not None:
            logging.disable(self._disabled)

    def leave(self) -> None:
        handler = self._handler
        self._heard[self._when] = handler.records, handler.stream
        self._stash[records_key], handler.records, handler.stream, handler.filters = self._everybodys
        self._set = {one: level for one, level in _levels(handler).items() if self._levels.get(one, level) != level}
        for one in self._set:
            one.setLevel(self._levels[one])
        self._disabled = None
        if (disabled := logging.root.manager.disable) != self._disable:
            self._disabled = disabled
            logging.disable(self._disable)


def _levels(handler: logging.Handler) -> dict[_HasLevel, int]:
    known = [one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    both: list[_HasLevel] = [handler, logging.root, *known]
    return {one: one.level for one in both}


class Captured:
    """A ``capsys`` fixture, or a similar one; pytest has only one at a time."""

    def __init__(self, fixture: pytest.CaptureFixture[Any]) -> None:
        self._fixture: Any = fixture
        self._manager: Any = fixture.request.config.pluginmanager.getplugin("capturemanager")
        self._in_use = self._on = False

    def leave(self) -> None:
        """Suspend the capture of this rank."""
        self._in_use = is_captured_by(self._manager, self._fixture)
        if self._in_use:
            self._on = suspend(self._fixture)
            self._manager.unset_fixture()

    def arrive(self) -> None:
        """Resume the capture of this rank."""
        if self._in_use:
            self._manager.set_fixture(self._fixture)
            resume(self._fixture, was_on=self._on)

    def show(self) -> None:
        """Put unread output into the report, at the end of a phase; the fixture's teardown may still read it."""
        self._fixture.close()


_OWN = "a MonkeyPatch keeps the patches of each simulated rank apart, unless a fixture of all ranks sets them"
PATCHES = (
    Patch(pytest.MonkeyPatch, "__init__", _noted, _OWN),
    *(Patch(pytest.MonkeyPatch, name, _on_the_ranks_own, _OWN) for name in _CHANGES),
    Patch(
        pytest.MonkeyPatch,
        "__deepcopy__",
        lambda _: lambda self, memo: self,
        "a rank that gets the controller's MonkeyPatch as an argument uses one of its own instead",
    ),
)
