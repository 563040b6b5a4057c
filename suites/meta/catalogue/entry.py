"""The catalogue's entry for one faulty program."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from traceback import extract_tb
from typing import Any

__all__ = ["FAULTS", "Fault", "fault", "lines_named_by"]

HERE = Path(__file__).parent
_MARK = re.compile(r"# (asks|blocks|differs|leaks|posts|raises|touches)$")
_PARTED = r"(?m:^.*(?:went on (?:to|in)|decides (?:between|whether)) .*$)"  # observe/parting.py
_LINE = re.compile(r"catalogue/(\w+\.py:\d+)")


@dataclass(frozen=True)
class Fault:
    """A program and the verdict on it.

    Args:
        program: takes ``right``; the first line of its docstring describes the fault.
        verdict: the class of the error.
        world_size: number of ranks that it takes.
        source: a report of such a bug, as ``pytorch #63486``; empty for a class of bugs without a ticket.
        fields: required fields of the error.
        says: a regular expression that the error's message matches.
        under: semantics profile -> the verdict there, if it differs; None: the program is no fault there.
        why: the reason for ``under``.
        twin_under: semantics profile -> the verdict on the twin, which is correct under all others.
        schedules: number of schedules that may be needed to find it.
    """

    program: Callable[[bool], Any]
    verdict: type[BaseException]
    world_size: int = 2
    source: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    says: str = ""
    under: Mapping[str, type[BaseException] | None] = field(default_factory=dict)
    why: str = ""
    twin_under: Mapping[str, type[BaseException]] = field(default_factory=dict)
    schedules: int = 1

    @property
    def name(self) -> str:
        return self.program.__name__

    @property
    def what(self) -> str:
        """Return the first line of the docstring."""
        return (self.program.__doc__ or "").partition("\n")[0]

    @property
    def file(self) -> str:
        return Path(inspect.getfile(self.program)).name

    def verdict_under(self, profile: str) -> type[BaseException] | None:
        return self.under.get(profile, self.verdict)

    def lines(self, mark: str = "") -> set[str]:
        """Return the lines with this mark, or with any, as ``file.py:12``."""
        lines, first = inspect.getsourcelines(self.program)
        return {f"{self.file}:{first + i}" for i, text in enumerate(lines) if _is_marked(text, mark)}


def _is_marked(text: str, mark: str) -> bool:
    found = _MARK.search(text.rstrip())
    return found is not None and mark in ("", found[1])


FAULTS: list[Fault] = []


def fault(verdict: type[BaseException], /, **said: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated program, which stays a plain function, so that processes can import it."""

    def enter(program: Callable[..., Any]) -> Callable[..., Any]:
        FAULTS.append(Fault(program, verdict, **said))
        return program

    return enter


def lines_named_by(error: BaseException) -> set[str]:
    """Return the catalogue lines that a message names; for an error of torch or of the user, the line that raised it.

    The last operation of a rank that has returned is left out, because it may be far from the fault. So are the lines
    about where ranks parted, which are those between the operations.
    """
    named = set(_LINE.findall(re.sub(f"; last operation .*|{_PARTED}", "", str(error))))
    if not named and error.__traceback__ is not None:
        frames = [frame for frame in extract_tb(error.__traceback__) if Path(frame.filename).parent == HERE]
        named = {f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-1:]}
    return named
