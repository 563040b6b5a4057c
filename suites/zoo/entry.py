"""One program of the zoo, and the verdict of its check."""

from __future__ import annotations

import inspect
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pdlcheck.errors import CheckFailed, Inconclusive, PdlcheckError

__all__ = ["ENTRIES", "Entry", "Judgement", "Verdict", "entry", "judge"]

Judgement: TypeAlias = Literal["right", "partial", "none", "wrong", "missed"]
Program: TypeAlias = Callable[[bool, Any], object]


@dataclass(frozen=True)
class Entry:
    """A bug in the shape of the project that had it.

    Args:
        program: takes ``broken`` and ``world``, and applies the check; its docstring describes the bug in one line.
        bug: the name of the bug.
        source: reports of it, as ``transformers #34242``.
        check: the check that ``docs/checks.md`` names for such code; ``sim`` for a run on simulated ranks without one.
        cause: a regular expression that the likely cause matches, or the whole message if the error has no cause.
        judged: whether that cause is the bug. ``partial``: true, but it does not lead to the line. ``none``: no cause
            is named. ``wrong``: it accuses something else. ``missed``: the check passes at its defaults.
        why: the reason for any judgement other than ``right``.
        also: the same bug under another check or argument, which finds what ``check`` misses at its defaults.
    """

    program: Program
    bug: str
    source: str
    check: str
    cause: str = ""
    judged: Judgement = "right"
    why: str = ""
    also: Program | None = None

    @property
    def what(self) -> str:
        """Return the first line of the docstring."""
        return (self.program.__doc__ or "").partition("\n")[0]

    @property
    def topic(self) -> str:
        """Return the name of the file."""
        return Path(inspect.getfile(self.program)).stem


@dataclass(frozen=True)
class Verdict:
    """The result of one run of a program.

    Args:
        error: the failure; None if the check passed.
        seconds: the time of the run.
    """

    error: BaseException | None
    seconds: float

    @property
    def cause(self) -> str:
        """Return the likely cause, or the whole message of an error without that field; empty if there is none."""
        if isinstance(self.error, CheckFailed):
            return self.error.cause or ""
        return str(self.error or "")


ENTRIES: list[Entry] = []


def entry(bug: str, source: str, /, **more: Any) -> Callable[[Program], Program]:
    """Register the decorated program."""

    def enter(program: Program) -> Program:
        ENTRIES.append(Entry(program, bug, source, **more))
        return program

    return enter


def judge(one: Entry, world: Any, *, broken: bool) -> Verdict:
    """Run a program, broken or right, and return the verdict.

    Raises:
        Exception: an error that is no verdict, such as a mistake in the program.
    """
    return verdict_on(lambda: one.program(broken, world))


def verdict_on(run: Callable[[], object]) -> Verdict:
    """Call ``run``, and return the verdict: an error of pdlcheck, also the type that torch has for a refused call.

    Raises:
        Exception: an error that is no verdict.
    """
    start = time.perf_counter()
    error: BaseException | None = None
    try:
        run()
    except Inconclusive:
        raise
    except (CheckFailed, PdlcheckError) as found:
        error = found
    except RuntimeError as refused:
        if not _is_of_an_operation(refused):
            raise
        error = refused
    return Verdict(error, time.perf_counter() - start)


def _is_of_an_operation(error: RuntimeError) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals["__name__"]).startswith("pdlcheck.operations.")


def judge_also(one: Entry, world: Any, *, broken: bool) -> Verdict:
    """Run ``also`` of a program, broken or right, and return the verdict; it passes if the entry has none."""
    also = one.also
    return verdict_on(lambda: also and also(broken, world))


def explains(one: Entry, verdict: Verdict) -> bool:
    """Return whether the verdict on the broken program is the one that the entry states."""
    if one.judged == "missed":
        return verdict.error is None
    if one.judged == "none":
        return verdict.error is not None and not verdict.cause
    return verdict.error is not None and re.search(one.cause, verdict.cause) is not None
