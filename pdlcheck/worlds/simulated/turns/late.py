"""Where each simulated rank is when its time is over, or Ctrl-C ends it."""

from __future__ import annotations

import bdb
import re
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pdlcheck.errors import RankTimeout
from pdlcheck.worlds.outcome import Raised, Returned
from pdlcheck.worlds.processes.controller.story import rank_interrupt, rank_timeout
from pdlcheck.worlds.processes.rank.position import Place, place_of

if TYPE_CHECKING:
    from pdlcheck.worlds.simulated.turns.scheduler import RankThread

__all__ = ["interrupted", "late"]

_BEGINNING = re.compile(rf'\A(?:  File "{re.escape(threading.__file__)}", .*\n(?:    .*\n)*)+')  # of any thread's stack
_DEBUGGERS = (bdb.__file__, "pydevd")  # in the path of a frame of a thread that a person has stopped


def late(
    limit_s: float, ranks: Sequence[RankThread], threads: Sequence[threading.Thread], running: RankThread
) -> RankTimeout | None:
    """Make the error for ranks of which one runs and did not end; None where a debugger has it."""
    places = _places(ranks, threads)
    if any(name in place.stack for place in places.values() for name in _DEBUGGERS):
        return None
    states = _states(ranks, running, places)
    stacks = {rank: _BEGINNING.sub("", place.stack) or None for rank, place in places.items()}
    return rank_timeout(limit_s, states, stacks)


def interrupted(ranks: Sequence[RankThread], threads: Sequence[threading.Thread], running: RankThread) -> str:
    """In words, where each rank is as somebody presses Ctrl-C."""
    places = _places(ranks, threads)
    return rank_interrupt(_states(ranks, running, places), places)


def _places(ranks: Sequence[RankThread], threads: Sequence[threading.Thread]) -> dict[int, Place]:
    """Of the ranks that have not ended."""
    pairs = zip(ranks, threads, strict=True)
    return {rank.rank: place_of(thread.ident or 0) for rank, thread in pairs if rank.outcome is None}


def _states(ranks: Sequence[RankThread], running: RankThread, places: Mapping[int, Place]) -> dict[int, str]:
    return {rank.rank: _words(rank, running, places.get(rank.rank)) for rank in ranks}


def _words(rank: RankThread, running: RankThread, place: Place | None) -> str:
    last = rank.network.last.get(rank.rank) if rank.network is not None else None
    then = f"; last operation {last}" if last is not None else ""
    if place is None:
        match rank.outcome:
            case Returned():
                return f"has returned{then}"
            case Raised(error=error):
                return f"raised {type(error).__name__}{then}"
            case _:
                return f"has ended{then}"
    if rank is running:
        return f"busy {place.words}".rstrip() + then
    if rank.ready is not None:
        return f"in {rank.waits_for}"
    return f"waits for its turn {place.words}{then}" if place.words else "has not begun"
