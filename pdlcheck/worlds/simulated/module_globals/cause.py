"""The search for the module globals that make a simulated run differ from one on processes.

The search is an experiment. It repeats the run with globals of its own for each rank. If the run then ends as on
processes, sharing the globals is the cause. It then separates only one of the changed globals at a time, and names
those that suffice.
"""

from __future__ import annotations

import dis
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import CodeType, FunctionType, ModuleType
from typing import Any

from pdlcheck.time_budgets import CAUSE_LIMIT_S, CAUSE_S
from pdlcheck.worlds.observe.callsite import short
from pdlcheck.worlds.simulated.module_globals.run import CONTROLLER, Change, OwnGlobals, UserState, own_globals

__all__ = ["Finding", "Separate", "find_cause", "find_modules", "told"]

Separate = Callable[[], AbstractContextManager[None]]

_AT_MOST = 12  # the largest number of globals that are tried one at a time


@dataclass(frozen=True)
class Finding:
    """The result of the experiments.

    Args:
        cause: ``globals``; ``other``, if the run still differs with globals of its own for each rank; or ``before``, if
            it does not differ with globals as they were at the beginning: something has changed them before the run.
        blamed: the globals whose sharing makes the difference; empty unless the cause is ``globals``.
        alone: True if one of them alone suffices, False if they are needed together.
        like: the result of the run with globals of its own for each rank.
        modules: the modules that ``own_globals`` must name to get this result in every run; empty if they are not known
            to suffice.
    """

    cause: str
    blamed: tuple[Change, ...] = ()
    alone: bool = True
    like: Any = None
    modules: tuple[str, ...] = ()

    @property
    def shared(self) -> str:
        """Return what the blamed objects are: ``module globals``, ``closures``, or both."""
        enclosed = {"'s " in change.path for change in self.blamed}
        return {(True,): "closures", (False, True): "module globals and closures"}.get(
            tuple(sorted(enclosed)), "module globals"
        )

    @property
    def by_the_caller(self) -> bool:
        """Return whether the code that calls ``world.run`` has changed one of them itself."""
        return any(CONTROLLER in change.ranks for change in self.blamed)


def find_cause(
    run: Callable[[Separate], Any], as_on_processes: Callable[[Any], bool], start: UserState, function: Any = None
) -> Finding:
    """Repeat ``run`` from the same beginning to find the cause. The user's modules end as they are now.

    Args:
        run: runs once on simulated ranks and returns how the run ended; does not raise. Its argument returns a context
            manager, inside which each rank has globals of its own.
        as_on_processes: returns whether a result of ``run`` is how processes end.
        start: what the modules held before the run.
        function: see :class:`UserState`.
    """
    now = UserState(function)

    def attempt(only: Set[str] | None) -> tuple[Any, list[Change]]:
        observers: list[OwnGlobals] = []

        @contextmanager
        def separate() -> Iterator[None]:
            with own_globals(only, function) as observer:
                observers.append(observer)
                yield

        start.begin_again()
        result = run(separate)
        return result, [change for observer in observers for change in observer.changes()]

    try:
        if as_on_processes(attempt(frozenset())[0]):
            return Finding("before")
        like, changes = attempt(None)
        if not as_on_processes(like):
            return Finding("other")
        changes = [change for change in changes if change.kind != "module"] or changes
        blamed, alone = _blame(changes, lambda only: as_on_processes(attempt(only)[0]))
        return Finding("globals", tuple(blamed), alone, like)
    finally:
        now.put_back()


def find_modules(
    finding: Finding,
    run: Callable[[Sequence[str]], Any],
    as_on_processes: Callable[[Any], bool],
    start: UserState,
    candidates: Sequence[str] = (),
) -> Finding:
    """Return the finding with the modules that ``own_globals`` must name, so that every run ends as on processes.

    Args:
        finding: the result of :func:`find_cause`.
        run: runs once on simulated ranks with ``own_globals`` of these modules and returns how the run ended.
        as_on_processes: see :func:`find_cause`.
        start: see :func:`find_cause`.
        candidates: the modules to try if the experiment of :func:`find_cause` found nothing. That experiment leaves out
            what fixtures do.
    """
    now = UserState()

    def holds(names: Sequence[str]) -> Any:
        start.begin_again()
        like.append(run(names))
        return as_on_processes(like[-1])

    like: list[Any] = []
    try:
        if finding.cause == "globals":
            names = _modules_of(finding)
            return replace(finding, modules=tuple(names)) if names and holds(names) else finding
        if finding.cause != "other" or not candidates or not holds(candidates):
            return finding
        found = _few(candidates, holds, _Trials())
        return Finding("globals", like=like[0], modules=tuple(found))
    finally:
        now.put_back()


class _Trials:
    """The time of trials: seconds on a core, so that the load of the machine does not change what is found.

    Trials that sleep take no time on a core. A wall-clock limit, which is longer, ends them.
    """

    def __init__(self) -> None:
        self._until, self._at_most = time.process_time() + CAUSE_S, time.monotonic() + CAUSE_LIMIT_S

    def go_on(self) -> bool:
        return time.process_time() < self._until and time.monotonic() < self._at_most


def _few(
    names: Sequence[str], holds: Callable[[Sequence[str]], bool], trials: _Trials, others: Sequence[str] = ()
) -> Sequence[str]:
    """Return the names that are needed in addition to ``others``, found by halving; more of them if time runs out."""
    if len(names) < 2 or not trials.go_on():
        return names
    left, right = names[: len(names) // 2], names[len(names) // 2 :]
    for half in (left, right):
        if holds([*others, *half]):
            return _few(half, holds, trials, others)
    left = _few(left, holds, trials, [*others, *right])
    return [*left, *_few(right, holds, trials, [*others, *left])]


def _blame(changes: Sequence[Change], differs: Callable[[Set[str]], bool]) -> tuple[list[Change], bool]:
    """Return the changes to blame, and whether one of them alone suffices.

    A change alone suffices if the run ends as on processes when only its value is separate for each rank. If none
    suffices, return all changes that are needed together.
    """
    trials = _Trials()
    few = changes[:_AT_MOST]
    if len(changes) == 1:
        return list(changes), True
    if alone := [one for one in few if trials.go_on() and differs({one.path})]:
        return alone, True
    paths = {change.path for change in changes}
    needed = [one for one in few if trials.go_on() and not differs(paths - {one.path})]
    return needed or list(few), False


def told(finding: Finding) -> list[str]:
    """Return one line for each blamed global: ``train.cache  dict, changed by ranks 0 and 1, train.py:12``."""
    width = max((len(change.path) for change in finding.blamed), default=0)
    lines = []
    for change in finding.blamed:
        line = f"{change.path:{width}}  {change.kind}, changed by {_by(change.ranks)}"
        place = _place(change.path)
        lines.append(f"{line}, {place}" if place else line)
    return lines


def _modules_of(finding: Finding) -> list[str]:
    """Return the modules that hold the blamed globals."""
    paths = [change.path for change in finding.blamed if "'s " not in change.path]
    return sorted({name for path in paths if (name := _split(path)[0])})


def _split(path: str) -> tuple[str, list[str]]:
    """Return the module of a path, and the names below it."""
    parts = path.split("(")[0].split("'s ")[0].split(".")
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in sys.modules:
            return name, parts[length:]
    return "", parts


def _by(ranks: Sequence[int]) -> str:
    numbers = [str(rank) for rank in ranks if rank != CONTROLLER]
    head, last = ", ".join(numbers[:-1]), "".join(numbers[-1:])
    words = f"ranks {head} and {last}" if head else f"rank {last}" if last else ""
    test = "the caller of world.run" if CONTROLLER in ranks else ""
    return " and ".join(part for part in (test, words) if part)


def _place(path: str) -> str:
    """Return ``file:line`` of the first line, in a function of the path's module, that sets the global.

    If no line sets it, return the first one that mentions it.
    """
    name, names = _split(path)
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        return ""
    function = getattr(module, names[0], None) if names else None
    found = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    found = found and found.co_firstlineno
    for name in reversed(names[:2]):
        found = found or _line(module, name)
    return f"{short(file)}:{found}" if found else short(os.fspath(file))


def _line(module: ModuleType, name: str) -> int | None:
    lines: dict[bool, int] = {}
    for code in _codes(vars(module).values(), module):
        for instruction in dis.get_instructions(code):
            line = (instruction.positions and instruction.positions.lineno) or code.co_firstlineno
            if instruction.argval == name and instruction.opname.startswith(("STORE_", "LOAD_")):
                sets = instruction.opname in ("STORE_ATTR", "STORE_GLOBAL")
                lines[sets] = min(line, lines.get(sets, line))
    return lines.get(True, lines.get(False))


def _codes(values: Any, module: ModuleType) -> Iterator[CodeType]:
    for value in list(values):
        value = getattr(value, "__wrapped__", value)
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            yield value.__code__
            yield from (constant for constant in value.__code__.co_consts if isinstance(constant, CodeType))
        elif isinstance(value, type) and value.__module__ == module.__name__:
            yield from _codes(vars(value).values(), module)
