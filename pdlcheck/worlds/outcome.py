"""The outcome of each rank, and the one result or error that a run makes of all outcomes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from traceback import StackSummary, TracebackException
from typing import Any

from pdlcheck.errors import PdlcheckError, RankFailed
from pdlcheck.operations.words import who
from pdlcheck.worlds.exceptions import add_note, notes_of, text_of
from pdlcheck.worlds.site import is_ours

__all__ = [
    "ENDS_A_PROCESS",
    "Outcome",
    "Raised",
    "Returned",
    "Stopped",
    "as_failure",
    "check_has_run",
    "cure_of_exit",
    "first_cause",
    "less_severe",
    "results",
    "severity",
    "stopped_by_nobody",
    "without_addresses",
]

ENDS_A_PROCESS = (SystemExit, KeyboardInterrupt, GeneratorExit)  # raised in the controller, they would end it
less_severe: list[type[BaseException]] = []  # exceptions that rank below a failure, the least severe last: skips

_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+", re.IGNORECASE)


@dataclass(frozen=True)
class Returned:
    """The rank's function returned ``value``; ``last`` describes the rank's last operation, where known."""

    rank: int
    value: Any
    last: str = ""


@dataclass(frozen=True)
class Raised:
    """The rank's function raised, or its process died.

    Args:
        rank: the rank.
        error: the exception itself if it could be sent to the controller, else a ``RankFailed`` that quotes it.
        traceback: the formatted traceback; empty if ``error`` still carries its own.
        order: the number of the failure in order of time; the smallest one is the first cause.
        output: the text that the rank wrote to stdout and stderr, if it was captured.
        last: a description of the rank's last operation, where known.
        consequence: the error only reports that another rank has gone.
        site: the user's line that raised, ``file.py:12``, where known.
    """

    rank: int
    error: BaseException
    traceback: str = ""
    order: int = 0
    output: str = ""
    last: str = ""
    consequence: bool = False
    site: str = ""


@dataclass(frozen=True)
class Stopped:
    """The rank was stopped because another rank failed.

    ``where`` is the call it was in, and ``last`` describes its last operation.
    """

    rank: int
    where: str = ""
    last: str = ""


Outcome = Returned | Raised | Stopped


def check_has_run(value: Any, rank: int) -> None:
    """Raise if ``value``, the return value of a rank's function, shows that the body of the function has not run."""
    if inspect.isgenerator(value) or inspect.iscoroutine(value) or inspect.isasyncgen(value):
        if inspect.iscoroutine(value):
            value.close()  # else Python warns that it was never awaited
        raise TypeError(
            f"rank {rank} returned a {type(value).__name__} that cannot be sent to the controller: the body of its "
            "function has not run; return tensors, numbers, strings, or containers of these"
        )


def stopped_by_nobody(rank: int, words: str) -> RankFailed:
    """Return the failure of a rank that raised ``PeerFailed`` although no rank had failed before."""
    return RankFailed(
        f"rank {rank} raised PeerFailed ({words}) and no rank has failed before it: the exception was kept from an "
        "earlier run, or made by hand; let it pass where it comes up, and raise another one for a failure",
        rank=rank,
        traceback="",
    )


def cure_of_exit(error: SystemExit) -> str:
    """Return advice for a rank that called ``sys.exit``: a call on ranks has no exit code, it returns or fails."""
    if not error.code:
        return "a rank that has done its work returns: catch SystemExit around a program that ends so"
    return "raise an ordinary exception to make the call fail"


def as_failure(rank: int, error: BaseException, traceback: str) -> RankFailed:
    """Return the failure that replaces one of ``ENDS_A_PROCESS``.

    The original exception would end the controller, without any message if its code is 0.
    """
    if isinstance(error, SystemExit):
        what = f"called sys.exit({error.code!r}); {cure_of_exit(error)}"
    else:
        what = f"raised {type(error).__name__}; raise an ordinary exception to make the call fail"
    failed = RankFailed(f"rank {rank} {what}", rank=rank, traceback=traceback)
    return failed.with_traceback(error.__traceback__)


def without_addresses(text: str) -> str:
    """Return ``text`` without memory addresses, so that equal objects of two ranks read alike.

    For example, ``<Net object at 0x7f54c6b0>`` becomes ``<Net object at 0x...>``.
    """
    return _ADDRESS.sub("at 0x...", text)


def results(outcomes: Sequence[Outcome]) -> list[Any]:
    """Return the value of every rank, or raise the first cause with notes about the outcomes of all ranks."""
    __tracebackhide__ = True
    raised = [outcome for outcome in outcomes if isinstance(outcome, Raised)]
    if not raised:
        return [o.value for o in outcomes if isinstance(o, Returned)]
    first = first_cause(raised)
    told = getattr(first.error, "ranks", None) is not None  # Deadlock and similar errors already describe every rank
    for note in _output(first) if told else _story(first, outcomes):
        add_note(first.error, note)
    raise first.error


def first_cause(raised: Sequence[Raised]) -> Raised:
    """Return the first failure.

    If several ranks raise the same verdict, prefer a rank that the verdict is about: its line is the one to show.
    """
    first = min(raised, key=lambda outcome: (severity(outcome.error), outcome.order))
    odd = getattr(first.error, "odd", ()) if isinstance(first.error, PdlcheckError) else ()
    return next((outcome for outcome in raised if outcome.rank in odd and _alike(outcome, first)), first)


def severity(error: BaseException) -> int:
    """Return 0 for a failure, and more for an exception that ranks below it, such as a skip."""
    return next((number for number, kind in enumerate(less_severe, 1) if isinstance(error, kind)), 0)


def _story(first: Raised, outcomes: Sequence[Outcome]) -> list[str]:
    """Return one line for all ranks with the same outcome, then each failure in full, starting with the first cause."""
    raised_this = _words(first, first, len(outcomes))
    lines: dict[str, tuple[str, list[int]]] = {without_addresses(raised_this): (raised_this, [])}
    others: dict[tuple[type, str], Raised] = {}
    for outcome in outcomes:
        line = _words(outcome, first, len(outcomes))
        lines.setdefault(without_addresses(line), (line, []))[1].append(outcome.rank)
        if isinstance(outcome, Raised) and not (outcome.consequence or _alike(outcome, first)):
            others.setdefault((type(outcome.error), outcome.site or _said(outcome)), outcome)
    notes = []
    for line, ranks in lines.values():
        was = "was" if len(ranks) == 1 else "were"
        notes.append(line.replace("{ranks}", who([ranks])).replace("{was}", was))
    shown = [first, *others.values()]
    notes += _notes(outcomes, shown)
    for raised in shown:
        if raised.traceback or raised is not first:
            notes.append(f"traceback on rank {raised.rank}:\n{_traceback(raised)}")
        notes += _output(raised)
    return notes


def _notes(outcomes: Sequence[Outcome], shown: Sequence[Raised]) -> list[str]:
    """Return one line for all ranks with the same note, if no failure that is shown in full has this note."""
    known = {without_addresses(note) for raised in shown for note in notes_of(raised.error)}
    ranks: dict[str, tuple[str, list[int]]] = {}
    for outcome in outcomes:
        if isinstance(outcome, Raised) and not outcome.consequence:
            own = {without_addresses(note): note for note in notes_of(outcome.error)}
            for text, note in own.items():
                if text not in known:
                    ranks.setdefault(text, (note, []))[1].append(outcome.rank)
    return [f"{who([noted])} noted: {note}" for note, noted in ranks.values()]


def _output(raised: Raised) -> list[str]:
    return [f"output of rank {raised.rank}:\n{raised.output.rstrip()}"] if raised.output.strip() else []


def _words(outcome: Outcome, first: Raised, world_size: int) -> str:
    last = f"; last operation {outcome.last}" if outcome.last else ""
    match outcome:
        case Raised() if _alike(outcome, first):
            if _said(outcome) == _said(first):
                return f"{{ranks}} of {world_size} raised this{last}"
            return f"{{ranks}} failed at the same line: {_difference(outcome, first)}{last}"
        case Raised(error=error, consequence=True):
            waited = "imed out" in _head(error) or _head(error).startswith("wait timeout")
            became = "gave up waiting" if waited else "lost the connection"
            return f"{{ranks}} {became}, as rank {first.rank} failed: {_head(error)}{last}"
        case Raised(error=error):
            return f"{{ranks}} raised {type(error).__name__}: {_head(error)}{last}"
        case Returned():
            return f"{{ranks}} returned{last}"
        case Stopped(where=where):
            return f"{{ranks}} {{was}} stopped {where or f'outside any communication{last}'}"


def _alike(one: Raised, other: Raised) -> bool:
    """Return whether two ranks failed in the same way: one type, and the same text or the same line."""
    same_text = _said(one) == _said(other)
    return type(one.error) is type(other.error) and (same_text or (bool(one.site) and one.site == other.site))


def _said(raised: Raised) -> str:
    """Return the text of a failure without the parts that differ between ranks."""
    text = without_addresses(text_of(raised.error))
    return text.removeprefix(f"rank {raised.rank} ") if isinstance(raised.error, RankFailed) else text


def _difference(raised: Raised, other: Raised) -> str:
    """Return the first line of one message that the other message does not have."""
    known = set(_said(other).splitlines())
    lines = zip(_said(raised).splitlines(), text_of(raised.error).splitlines(), strict=False)
    return next((line for said, line in lines if said not in known), _head(raised.error))


def _head(error: BaseException) -> str:
    return (text_of(error).splitlines() or [""])[0]


def _traceback(raised: Raised) -> str:
    if raised.traceback:
        return raised.traceback.rstrip()
    formatted = TracebackException.from_exception(raised.error)
    frames = [frame for frame in formatted.stack if not is_ours(frame.filename)]
    formatted.stack = StackSummary.from_list(frames or formatted.stack)
    return "".join(formatted.format()).rstrip()
