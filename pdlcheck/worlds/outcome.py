"""How a rank ended, and the one result or the one error that is made of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Outcome", "Raised", "Returned", "Stopped", "results"]


@dataclass(frozen=True)
class Returned:
    """The rank's function returned ``value``."""

    rank: int
    value: Any


@dataclass(frozen=True)
class Raised:
    """The rank's function raised, or its process died.

    Args:
        error: the exception itself where it could travel, else a ``RankFailed`` that quotes it.
        traceback: the formatted traceback, empty where ``error`` still carries its own.
        order: failures are numbered in the order in which they happened; the smallest is the first cause.
        output: what the rank wrote to stdout and stderr, if it was captured.
    """

    rank: int
    error: BaseException
    traceback: str = ""
    order: int = 0
    output: str = ""


@dataclass(frozen=True)
class Stopped:
    """The rank itself was well; it was stopped because another one failed. ``where`` is the call it was in."""

    rank: int
    where: str = field(default="")


Outcome = Returned | Raised | Stopped


def results(outcomes: Sequence[Outcome]) -> list[Any]:
    """Return the value of every rank, or raise the first cause with a note about every other rank."""
    __tracebackhide__ = True
    raised = sorted((o for o in outcomes if isinstance(o, Raised)), key=lambda o: o.order)
    if not raised:
        return [o.value for o in outcomes if isinstance(o, Returned)]
    first = raised[0]
    world_story = getattr(first.error, "ranks", None)
    if world_story is None:  # Deadlock and its kin already tell about every rank
        for note in _story(first, outcomes):
            first.error.add_note(note)
    raise first.error


def _story(first: Raised, outcomes: Sequence[Outcome]) -> list[str]:
    notes = [f"rank {first.rank} of {len(outcomes)} raised this"]
    if first.traceback:
        notes.append(f"traceback on rank {first.rank}:\n{first.traceback.rstrip()}")
    if first.output:
        notes.append(f"output of rank {first.rank}:\n{first.output.rstrip()}")
    for outcome in outcomes:
        if outcome.rank == first.rank:
            continue
        match outcome:
            case Returned():
                notes.append(f"rank {outcome.rank} returned")
            case Raised(error=error) if _same(error, first.error):
                notes.append(f"rank {outcome.rank} raised the same")
            case Raised(error=error):
                notes.append(f"rank {outcome.rank} raised {type(error).__name__}: {_head(error)}")
            case Stopped(where=where):
                notes.append(f"rank {outcome.rank} was stopped {where or 'outside any communication'}")
    return notes


def _same(one: BaseException, other: BaseException) -> bool:
    return type(one) is type(other) and str(one) == str(other)


def _head(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
