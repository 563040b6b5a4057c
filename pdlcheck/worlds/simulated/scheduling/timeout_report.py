"""The report of where each simulated rank is when its time limit elapses, or when Ctrl-C ends the run."""

from __future__ import annotations

import bdb
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdlcheck.errors import RankTimeout
from pdlcheck.worlds.outcome import Outcome, Raised, Returned
from pdlcheck.worlds.rank_reports import rank_interrupt, rank_timeout
from pdlcheck.worlds.stack_position import Place, places_of

if TYPE_CHECKING:
    from pdlcheck.worlds.simulated.scheduling.scheduler import RankThread

__all__ = ["interrupt_note", "timeout_error"]

# the first frames of every thread's stack
_BEGINNING = re.compile(rf'\A(?:  File "{re.escape(threading.__file__)}", .*\n(?:    .*\n)*)+')
_DEBUGGERS = (bdb.__file__, "pydevd")  # in the path of a frame of a thread that a debugger has stopped


@dataclass(frozen=True, slots=True)
class _Seen:
    """The state of a rank at one moment; ``waits_for`` counts only if ``is_blocked``."""

    outcome: Outcome | None
    is_blocked: bool
    waits_for: Any
    last: Any


def timeout_error(
    limit_s: float, ranks: Sequence[RankThread], threads: Sequence[threading.Thread], running: RankThread, turn_s: float
) -> RankTimeout | None:
    """Return the error for ranks that have not ended within ``limit_s``; None if a debugger has stopped one.

    ``running`` has the turn, and its turn has lasted ``turn_s`` seconds.
    """
    seen, places = _look(ranks, threads)
    if any(name in place.stack for place in places.values() for name in _DEBUGGERS):
        return None
    states = _states(seen, places, running.rank, f", its turn has lasted {turn_s:.1f} s")
    stacks = {rank: _BEGINNING.sub("", place.stack) or None for rank, place in places.items()}
    return rank_timeout(limit_s, states, stacks)


def interrupt_note(ranks: Sequence[RankThread], threads: Sequence[threading.Thread], running: RankThread) -> str:
    """Return a text that states where each rank is when the user presses Ctrl-C."""
    seen, places = _look(ranks, threads)
    return rank_interrupt(_states(seen, places, running.rank), places)


def _look(
    ranks: Sequence[RankThread], threads: Sequence[threading.Thread]
) -> tuple[dict[int, _Seen], dict[int, Place]]:
    """Return the state of all ranks, and the places of those that have not ended.

    Nothing here may release the interpreter lock before all ranks are read: the running rank would go on.
    """
    seen = {
        rank.rank: _Seen(
            rank.outcome,
            rank.ready is not None,
            rank.waits_for,
            rank.engine.last.get(rank.rank) if rank.engine is not None else None,
        )
        for rank in ranks
    }
    pairs = zip(ranks, threads, strict=True)
    return seen, places_of({rank.rank: thread.ident or 0 for rank, thread in pairs if seen[rank.rank].outcome is None})


def _states(
    seen: Mapping[int, _Seen], places: Mapping[int, Place], running: int, of_running: str = ""
) -> dict[int, str]:
    return {rank: _words(one, places.get(rank), rank == running, of_running) for rank, one in seen.items()}


def _words(seen: _Seen, place: Place | None, runs: bool, of_running: str) -> str:
    then = f"; last operation {seen.last}" if seen.last is not None else ""
    if place is None:
        match seen.outcome:
            case Returned():
                return f"has returned{then}"
            case Raised(error=error):
                return f"raised {type(error).__name__}{then}"
            case _:
                return f"has ended{then}"
    if runs:
        return f"busy {place.words}".rstrip() + of_running + then
    if seen.is_blocked:
        return f"in {seen.waits_for}"
    return f"waits for its turn {place.words}{then}" if place.words else "has not begun"
