"""What the catalogue says of one faulty program."""

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
_LINE = re.compile(r"catalogue/(\w+\.py:\d+)")


@dataclass(frozen=True)
class Fault:
    """A program and the verdict on it.

    Args:
        program: takes ``right``; its docstring says in one line what is wrong.
        verdict: the class of the error.
        world_size: how many ranks it takes.
        source: where such a bug happened, as ``pytorch #63486``; empty for a class of bugs without a ticket.
        fields: what the error's fields must be.
        says: a regular expression that the error's message matches.
        under: semantics profile -> the verdict there, where it is another one; None: what is done is no fault there.
        why: why ``under`` says so.
        twin_under: semantics profile -> the verdict on the right twin, which is right elsewhere alone.
        schedules: how many schedules may be needed to find it.
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
        """The first line of the docstring."""
        return (self.program.__doc__ or "").partition("\n")[0]

    @property
    def file(self) -> str:
        return Path(inspect.getfile(self.program)).name

    def verdict_under(self, profile: str) -> type[BaseException] | None:
        return self.under.get(profile, self.verdict)

    def lines(self, mark: str = "") -> set[str]:
        """The lines with this mark, or with any, as ``file.py:12``."""
        lines, first = inspect.getsourcelines(self.program)
        return {f"{self.file}:{first + i}" for i, text in enumerate(lines) if _is_marked(text, mark)}


def _is_marked(text: str, mark: str) -> bool:
    found = _MARK.search(text.rstrip())
    return found is not None and mark in ("", found[1])


FAULTS: list[Fault] = []


def fault(verdict: type[BaseException], /, **said: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the decorated program; it stays a plain function, which processes can import."""

    def enter(program: Callable[..., Any]) -> Callable[..., Any]:
        FAULTS.append(Fault(program, verdict, **said))
        return program

    return enter


def lines_named_by(error: BaseException) -> set[str]:
    """The lines of the catalogue that a message names; for an error of torch or of the user, where it was raised.

    Without the last operation of a rank that has returned, which may be far from the fault.
    """
    named = set(_LINE.findall(re.sub("; last operation .*", "", str(error))))
    if not named and error.__traceback__ is not None:
        frames = [frame for frame in extract_tb(error.__traceback__) if Path(frame.filename).parent == HERE]
        named = {f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-1:]}
    return named
