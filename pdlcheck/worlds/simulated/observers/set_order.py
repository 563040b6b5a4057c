"""Loops over sets in which ranks communicate: each process of a cluster has its own order of the elements.

Each interpreter chooses a seed for the hashes of strings when it starts, and most objects hash by their address.
Simulated ranks share one interpreter, and therefore one order. A program passes here, and mixes up its operations on a
cluster.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from pdlcheck.errors import SetOrderWarning
from pdlcheck.worlds.observe import Operation, Signature
from pdlcheck.worlds.observe.callsite import short
from pdlcheck.worlds.observe.set_loops import NO_ORDER, Loop, is_set, is_stable, loops_around, scope_of, user_frames
from pdlcheck.worlds.simulated.engine.observer import Observer
from pdlcheck.worlds.simulated.schedules.access import Post

__all__ = ["SetOrder", "take_found"]

_LOOKS = 16  # times that each call of a rank is examined in one run; more take longer and hardly find more
_POSTS = 64  # times that the callers of each communicating line of a rank are examined in one run
_told: set[str] = set()
_found: dict[str, str] = {}  # of the runs since `take_found`: a sentence for each loop, by its line


def take_found() -> list[str]:
    """Return a sentence for each loop that was found since the last call, whether or not a warning reported it."""
    found = list(_found.values())
    _found.clear()
    return found


class SetOrder(Observer):
    """The loops over sets that are found on the ranks of one run."""

    def __init__(self) -> None:
        self._line = ""
        self._posts: dict[tuple[int, str, str], int] = {}  # posts of each line, by rank, line and caller
        self._looks: dict[tuple[int, int, int], int] = {}  # examinations of each call, by rank, code and place
        self._elements: dict[tuple[int, int, int], Any] = {}  # of loops that are under way, by rank, frame and line

    def before_post(self, operation: Operation, post: Post) -> None:
        """Check whether a loop over a set leads to the operation that a rank is about to post."""
        signature = operation.signature
        if self._line or signature.op in NO_ORDER:
            return
        place = signature.rank, signature.where, signature.caller
        posts = self._posts[place] = self._posts.get(place, 0) + 1
        if posts > _POSTS:
            return
        for frame, path in user_frames(sys._getframe(1)):
            loops = loops_around(path, frame.f_lineno)
            if loops and (loop := self._loop_over_a_set(signature.rank, frame, loops)):
                self._tell(signature, f"{short(path)}:{loop.line}", loop.at(path))
                return

    def warning(self) -> SetOrderWarning | None:
        """Return the warning, once for each loop in the life of the process; None if there is none."""
        line, self._line = self._line, ""
        return SetOrderWarning(line) if line else None

    def _tell(self, signature: Signature, where: str, loop: str) -> None:
        what = f"ranks post {signature.op} in the order of a set: {loop}"
        _found[where] = what
        if where in _told:
            return
        _told.add(where)
        self._line = (
            f"{what}. Simulated ranks share one order; on processes and on a cluster each rank has its own, as each "
            "process hashes strings in another way. Loop over sorted(...) or a list"
        )

    def _loop_over_a_set(self, rank: int, frame: FrameType, loops: tuple[Loop, ...]) -> Loop | None:
        place = rank, id(frame.f_code), frame.f_lasti
        looks = self._looks[place] = self._looks.get(place, 0) + 1
        if looks > _LOOKS:
            return None
        return next((loop for loop in loops if self._is_of_a_set(rank, frame, loop)), None)

    def _is_of_a_set(self, rank: int, frame: FrameType, loop: Loop) -> bool:
        """Return whether the loop is past its first element, in a set whose order is not the same everywhere."""
        scope = scope_of(frame)
        elements = [scope[name] for name in loop.names if name in scope]
        if all(is_stable(one) for one in elements) or not is_set(loop.iterable, scope):
            return False
        key = rank, id(frame), loop.line
        if key not in self._elements:
            self._elements[key] = elements
            return False
        return any(one is not other for one, other in zip(self._elements[key], elements, strict=False))
