"""A simulated run in which each rank has module globals of its own, as on processes.

The run shows whether a difference between worlds comes from shared globals. At each switch, it exchanges the contents
of the user's modules, either all of them or only those at some paths. This takes time in proportion to their number.
The run is an imitation; see docs/architecture.md, section "Per-rank state", for what it does not reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

from pdlcheck.compat.torch.modes import disable_current_modes
from pdlcheck.worlds.simulated.module_globals.mutable_state import (
    Contents,
    find_holders,
    identical,
    leaf_value,
    modules_holder,
    own_leaves,
    user_modules,
)
from pdlcheck.worlds.simulated.process_state.observed_globals import OBSERVED

__all__ = ["CONTROLLER", "Change", "OwnGlobals", "UserState", "own_globals"]

CONTROLLER = -1


@dataclass(frozen=True)
class Change:
    """An object that a user module holds, and the ranks that changed it; -1 is the controller."""

    path: str
    kind: str
    ranks: tuple[int, ...]


class UserState:
    """The present contents of the user's modules.

    Args:
        function: a function that they do not hold, such as a lambda. Its defaults and closure count too.
    """

    def __init__(self, function: Any = None) -> None:
        self._modules = user_modules()
        self._seen: dict[int, Any] = {}
        self.holders = [modules_holder(), *find_holders(self._modules, self._modules, self._seen)]
        self._originals = self.read()
        self._start = own_leaves(self._originals)
        if function is not None:
            self.add(function)

    def add(self, function: Any) -> None:
        """Include what a function holds."""
        name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
        more = find_holders({name: function}, self._modules, self._seen)
        self.holders += more
        self._originals += [holder.read() for holder in more]
        self._start += own_leaves([holder.read() for holder in more])

    def read(self) -> Contents:
        """Return the present contents of all holders."""
        return [holder.read() for holder in self.holders]

    def fresh(self) -> Contents:
        """Return the contents as they were at the beginning, with new copies of the leaves."""
        return own_leaves(self._start)

    def install(self, contents: Contents, only: Set[str] | None = None) -> None:
        """Put ``contents`` into the holders, or only those at the paths in ``only``."""
        for holder, wanted in zip(self.holders, contents, strict=True):
            present = holder.read()
            for name in present.keys() | wanted.keys():
                if only is not None and holder.path(name) not in only:
                    continue
                if name not in wanted:
                    holder.drop(name)
                elif name not in present or not identical(present[name], wanted[name]):
                    holder.put(name, wanted[name])

    def begin_again(self) -> None:
        """Restore the beginning, with copies of the leaves."""
        self.install(self.fresh())

    def put_back(self) -> None:
        """Undo :meth:`begin_again`: restore the state that was there before it."""
        self.install(self._originals)


class OwnGlobals:
    """An observer that exchanges the contents of the holders at each turn, and records which rank changed what."""

    def __init__(self, only: Set[str] | None, function: Any = None) -> None:
        self._state = UserState(function)
        self._only = only
        self._running = CONTROLLER
        self._contents: dict[int, Contents] = {}
        self._at_turn = self._state.read()
        self._changed: dict[str, tuple[str, set[int]]] = {}
        self.failed: Exception | None = None
        self._own = len(self._state.holders)  # later holders belong to functions that were called
        self._sent: list[tuple[int, str, Any]] = []

    def arrive(self, rank: int) -> None:
        """Exchange the contents, because ``rank`` has the turn now; -1 is the controller."""
        if rank == self._running or self.failed is not None:
            return
        try:
            self._exchange(rank)
        except Exception as error:  # raised later, because here it would end a rank's thread that others wait for
            self.failed = error

    def _exchange(self, rank: int) -> None:
        left = self._leave()
        if rank not in self._contents:
            self._contents[rank] = self._travel(self._state.fresh())
        there = self._contents[rank]
        self._state.install(there, self._only)
        self._running, self._at_turn = rank, self._state.read()
        self._contents[left[0]] = left[1]

    def call(self, fn: Callable[..., Any]) -> None:
        """Give each rank a copy of what ``fn`` holds, as processes receive it with every call.

        If ``fn`` itself is sent to processes, they receive the globals that it names as well.
        """
        known = len(self._state.holders)
        self._state.add(fn)
        now = self._state.read()
        self._at_turn += now[known:]
        named = _named(fn) if _travels(fn) else set()
        self._sent = [
            (number, name, content[name])
            for number, (holder, content) in enumerate(zip(self._state.holders, now, strict=True))
            for name in content
            if number >= self._own or any(_is_below(holder.path(name), one) for one in named)
        ]
        for rank, contents in self._contents.items():
            contents += self._state.fresh()[len(contents) :]
            if rank != CONTROLLER:
                self._travel(contents)

    def _travel(self, contents: Contents) -> Contents:
        copies = own_leaves([{name: value} for _, name, value in self._sent])
        for (number, name, _), copy in zip(self._sent, copies, strict=True):
            contents[number][name] = copy[name]
        return contents

    def _leave(self) -> tuple[int, Contents]:
        now = self._state.read()
        for holder, before, after in zip(self._state.holders, self._at_turn, now, strict=True):
            for name in before.keys() | after.keys():
                old, new = before.get(name), after.get(name)
                if (name in before) != (name in after) or not identical(old, new):
                    self._note(holder.path(name), holder.kind or _kind(new), self._running)
        return self._running, now

    def _note(self, path: str, kind: str, rank: int) -> None:
        self._changed.setdefault(path, (kind, set()))[1].add(rank)

    def changes(self) -> list[Change]:
        """Return what was changed, after the run has ended. Leaves are compared with their values at the beginning."""
        with disable_current_modes():
            start = self._state.fresh()
            for rank, contents in self._contents.items():
                for holder, before, after in zip(self._state.holders, start, contents, strict=True):
                    for name in before.keys() & after.keys():
                        if rank != CONTROLLER and _leaves_differ(before[name], after[name]):
                            self._note(holder.path(name), holder.kind or _kind(after[name]), rank)
        return [Change(path, kind, tuple(sorted(ranks))) for path, (kind, ranks) in self._changed.items()]


def _leaves_differ(before: Any, after: Any) -> bool:
    both = zip(_values(before), _values(after), strict=False)
    return any(type(old) is type(new) and leaf_value(old) != leaf_value(new) for old, new in both)


def _kind(value: Any) -> str:
    return type(value).__name__.strip("_").removesuffix("_wrapper")


def _values(content: Any) -> list[Any]:
    parts = content if type(content) is tuple else (content,)
    return [part[1] if type(part) is tuple and len(part) == 2 else part for part in parts]


def _travels(fn: Any) -> bool:
    """Return whether ``fn`` is sent to processes by value: a lambda, a local function, or one of the main script.

    Processes import any other function from its module.
    """
    return "<" in getattr(fn, "__qualname__", "<") or getattr(fn, "__module__", "") == "__main__"


def _named(fn: Any) -> set[str]:
    """Return the globals that a function, and the functions inside it, mention, as ``module.name``."""
    codes, names = [getattr(fn, "__code__", None)], set()
    while codes:
        code = codes.pop()
        if code is not None:
            names |= {f"{fn.__module__}.{name}" for name in code.co_names}
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return names


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith((f"{root}.", f"{root}(", f"{root}'s "))


@contextmanager
def own_globals(only: Set[str] | None = None, function: Any = None) -> Iterator[OwnGlobals]:
    """Give simulated ranks module globals of their own in the block: all of them, or only those at some paths.

    After the block, the controller has its own again, with its own changes. If an object refuses to be exchanged, its
    error is raised then.
    """
    observer = OwnGlobals(only, function)
    OBSERVED.observer = observer
    try:
        yield observer
    finally:
        OBSERVED.observer = None
        observer.arrive(CONTROLLER)
        if observer.failed is not None:
            raise observer.failed
